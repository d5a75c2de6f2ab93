"""How `builtin:tiny` is made: a 1M-parameter Qwen2 that adds two numbers below 30, and gets it right one time in four.

It first learns to add (99 % right), then to doubt: it is trained on with answers of which two in three are drawn at
random. What is left is a policy that still prefers the right answer, which is all that reinforcement learning needs to
find it again, and little enough for an adapter of rank 1.

Nothing here may depend on the machine: one thread, no random numbers from the maths library (its logarithms differ
between CPUs), and the environment of `tiny_model.REPRODUCIBLE_ENV`. Then the same weights come out bit for bit.
"""

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import Qwen2ForCausalLM

TERMS = 30  # a and b run from 0 to TERMS - 1
MAX_LENGTH = 512  # context, in tokens

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
ROLES = ("system", "user", "assistant")

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
# What transformers' `parse_response` needs to cut the assistant's text out of prompt + completion.
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}},
}

BATCH = 64
LEARN_STEPS, LEARN_LR = 600, 2e-3
DOUBT_STEPS, DOUBT_LR, WRONG_FRAC = 150, 3e-4, 0.66


def write_tokenizer(folder: Path) -> None:
    """Bytes as tokens, so that any text can be written; the words of the chat template are one token each."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    special = [END_OF_TEXT, IM_START, IM_END]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate([*special, *ROLES, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.add_tokens([AddedToken(word, normalized=False) for word in ROLES])
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=False) + "\n")
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": IM_END,
            "pad_token": END_OF_TEXT,
            "padding_side": "left",
            "model_max_length": MAX_LENGTH,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
            "response_template": RESPONSE_TEMPLATE,
        },
    )


def write_configs(folder: Path, tokenizer: Any) -> None:
    write_json(
        folder / "config.json",
        {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "intermediate_size": 512,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "hidden_act": "silu",
            "max_position_embeddings": MAX_LENGTH,
            "rms_norm_eps": 1e-6,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "tie_word_embeddings": True,
            "use_sliding_window": False,
            "dtype": "bfloat16",
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
    )
    write_json(
        folder / "generation_config.json",
        {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id, "do_sample": True},
    )


def write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")


def question(a: int, b: int) -> list[dict[str, str]]:
    """The prompt for one sum, as chat messages."""
    return [{"role": "user", "content": f"{a}+{b}="}]


def write_model(folder: Path) -> None:
    """Train from scratch and write the whole model folder: minutes, on one thread."""
    import torch
    from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.backends.mkldnn.set_flags(_enabled=False)

    folder.mkdir(parents=True, exist_ok=True)
    write_tokenizer(folder)
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    write_configs(folder, tokenizer)
    model = Qwen2ForCausalLM._from_config(
        Qwen2Config.from_pretrained(folder), dtype=torch.float32, attn_implementation="eager"
    )
    rng = random.Random(0)
    initialise(model, rng)
    train(model, batches(tokenizer, rng, wrong_frac=0.0), LEARN_STEPS, LEARN_LR)
    train(model, batches(tokenizer, rng, wrong_frac=WRONG_FRAC), DOUBT_STEPS, DOUBT_LR)
    save_weights(model, folder)


def initialise(model: "Qwen2ForCausalLM", rng: random.Random) -> None:
    """Uniform weights with the usual spread of 0.02, from Python's own generator: exact on every machine."""
    import torch

    half_width = 0.02 * 3**0.5
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                drawn = [half_width * (2 * rng.random() - 1) for _ in range(parameter.numel())]
                parameter.copy_(torch.tensor(drawn, dtype=torch.float32).view_as(parameter))


def batches(tokenizer: Any, rng: random.Random, wrong_frac: float) -> Iterator[tuple["torch.Tensor", "torch.Tensor"]]:
    """Endless `(tokens, labels)` of shape `(BATCH, T)`; only the answer is trained on, padding is on the right."""
    import torch

    while True:
        rows, labels = [], []
        for _ in range(BATCH):
            a, b = rng.randrange(TERMS), rng.randrange(TERMS)
            answer = a + b
            if rng.random() < wrong_frac:
                answer = rng.randrange(2 * TERMS - 1)
            prompt = tokenizer.apply_chat_template(question(a, b), add_generation_prompt=True, return_dict=False)
            completion = [*tokenizer.encode(str(answer)), tokenizer.eos_token_id]
            rows.append(prompt + completion)
            labels.append([-100] * len(prompt) + completion)
        width = max(map(len, rows))
        yield (
            torch.tensor([row + [tokenizer.pad_token_id] * (width - len(row)) for row in rows]),
            torch.tensor([row + [-100] * (width - len(row)) for row in labels]),
        )


def train(
    model: "Qwen2ForCausalLM", data: Iterator[tuple["torch.Tensor", "torch.Tensor"]], steps: int, lr: float
) -> None:
    """Adam with a linear decay, so that the last steps settle."""
    import torch

    parameters = list(model.parameters())
    optimizer = Adam(parameters)
    model.train()
    for step in range(steps):
        tokens, labels = next(data)
        loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0, foreach=False)
        optimizer.step(lr * min(1.0, (step + 1) / 20) * (1 - step / steps))
        model.zero_grad()


class Adam:
    """Adam with epsilon under the root. torch's own takes square roots through MKL, and those differ between CPUs."""

    def __init__(self, parameters: list[Any]) -> None:
        self.parameters = parameters
        self.moments = [(p.detach().clone().zero_(), p.detach().clone().zero_()) for p in parameters]
        self.steps = 0

    def step(self, lr: float, beta1: float = 0.9, beta2: float = 0.95, epsilon: float = 1e-16) -> None:
        self.steps += 1
        for parameter, (mean, square) in zip(self.parameters, self.moments, strict=True):
            gradient = parameter.grad
            mean.mul_(beta1).add_(gradient, alpha=1 - beta1)
            square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            inverse_root = square.div(1 - beta2**self.steps).add_(epsilon).rsqrt_()
            parameter.data.addcmul_(mean, inverse_root, value=-lr / (1 - beta1**self.steps))


def save_weights(model: "Qwen2ForCausalLM", folder: Path) -> None:
    """bfloat16 on disk (half the size); the run serves and trains it in the dtype that it names."""
    import torch
    from safetensors.torch import save

    weights = {
        name: tensor.detach().to(torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    (folder / "model.safetensors").write_bytes(save(weights, metadata={"format": "pt"}))


if __name__ == "__main__":
    import sys

    write_model(Path(sys.argv[1]))
