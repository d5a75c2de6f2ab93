"""A tokenizer that TRL's rollout worker can use: chat template, pad token, and a parser for the answers."""

from typing import Any

# ChatML's assistant turn. TRL knows templates only by their whole text; for those it would set much the same.
CHATML_ASSISTANT = "<|im_start|>assistant\n"
CHATML_RESPONSE = {
    "defaults": {"role": "assistant"},
    "start_anchor": CHATML_ASSISTANT,
    "fields": {"content": {"close_pattern": r"<\|im_end\|>\s*|<\|endoftext\|>\s*", "content": "text"}},
}
PROBE = "The answer is 7."


class TokenizerError(ValueError):
    """The model's tokenizer can't be trained with as it is; the message says what to do."""


def prepare_tokenizer(tokenizer: Any) -> Any:
    """Complete `tokenizer` in place for TRL, and try it: a parser that keeps the header would score every answer 0.

    Raises `TokenizerError` when there is no chat template, no pad or end token, or a template that nobody can parse.
    """
    if not tokenizer.chat_template:
        raise TokenizerError("the tokenizer has no chat template: use a chat model, or set one and save the tokenizer")
    if tokenizer.eos_token_id is None:
        raise TokenizerError("the tokenizer has no eos_token: nothing would end a completion")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    if getattr(tokenizer, "response_template", None) is None:
        tokenizer = _with_response_template(tokenizer)
    _try_parser(tokenizer)
    return tokenizer


def _with_response_template(tokenizer: Any) -> Any:
    from trl.chat_template_utils import add_response_schema

    try:
        return add_response_schema(tokenizer)
    except ValueError as unknown:
        if CHATML_ASSISTANT not in _rendered(tokenizer, PROBE):
            raise TokenizerError(
                "TRL does not know how to parse the answers of this chat template, and it is not ChatML: "
                "set tokenizer.response_template and save the tokenizer with the model"
            ) from unknown
    tokenizer.response_template = CHATML_RESPONSE
    return tokenizer


def _try_parser(tokenizer: Any) -> None:
    from trl.chat_template_utils import parse_response

    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "?"}], add_generation_prompt=True, return_dict=False
    )
    completion = [*tokenizer.encode(PROBE, add_special_tokens=False), tokenizer.eos_token_id]
    message = parse_response(tokenizer, completion, prefix=prompt, tools=[])
    if message.get("content", "").strip() != PROBE:
        raise TokenizerError(
            f"a completion {PROBE!r} is parsed as {message}: rewards would not see the answer; "
            "set a tokenizer.response_template that fits its chat template"
        )


def _rendered(tokenizer: Any, text: str) -> str:
    rendered: str = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    return rendered
