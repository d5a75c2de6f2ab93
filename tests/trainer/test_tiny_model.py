"""The built-in model: what is shipped is what the recipe makes, and it starts where a run can improve it."""

import hashlib
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase
from trl.chat_template_utils import parse_response

from bucket_grpo.trainer import tiny_model, tiny_recipe


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model.path())


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_model.path(), dtype=torch.float32).eval()


def answers(model: Any, tokenizer: PreTrainedTokenizerBase, greedy: bool) -> list[bool]:
    """For each of the 900 sums, whether one completion is right and ends by itself."""
    sums = [(a, b) for a in range(tiny_recipe.TERMS) for b in range(tiny_recipe.TERMS)]
    prompts = [tiny_recipe.question(a, b) for a, b in sums]
    inputs = tokenizer.apply_chat_template(
        prompts, add_generation_prompt=True, padding=True, return_tensors="pt", return_dict=True
    )
    torch.manual_seed(0)
    out = model.generate(**inputs, max_new_tokens=4, do_sample=not greedy, temperature=None if greedy else 1.0, top_k=0)
    texts = [tokenizer.decode(row).replace("<|endoftext|>", "") for row in out[:, inputs["input_ids"].shape[1] :]]
    return [text == f"{a + b}<|im_end|>" for text, (a, b) in zip(texts, sums, strict=True)]


def test_it_solves_a_quarter_when_sampled_and_prefers_the_right_answer(model: Any, tokenizer: Any) -> None:
    sampled, greedy = answers(model, tokenizer, greedy=False), answers(model, tokenizer, greedy=True)
    assert 0.20 <= sum(sampled) / len(sampled) <= 0.35
    assert sum(greedy) / len(greedy) >= 0.6


def test_it_is_small() -> None:
    assert sum(file.stat().st_size for file in tiny_model.path().iterdir()) <= 2_500_000


def test_a_completion_is_parsed_to_the_answer_alone(tokenizer: PreTrainedTokenizerBase) -> None:
    """TRL parses prompt and completion together; content with the assistant's header in it would never match a gold."""
    prompt = tokenizer.apply_chat_template(tiny_recipe.question(3, 4), add_generation_prompt=True, return_dict=False)
    for text, content in [("7<|im_end|>", "7"), ("7", "7"), ("a user: 7<|im_end|>", "a user: 7")]:
        message = parse_response(tokenizer, tokenizer.encode(text), prefix=prompt, tools=[])
        assert message == {"role": "assistant", "content": content}


def test_the_tokenizer_is_complete_for_the_rollout_worker(tokenizer: PreTrainedTokenizerBase) -> None:
    assert (tokenizer.eos_token, tokenizer.pad_token, tokenizer.padding_side) == ("<|im_end|>", "<|endoftext|>", "left")
    assert pickle.loads(pickle.dumps(tokenizer)).response_template == tiny_recipe.RESPONSE_TEMPLATE


@pytest.mark.parametrize("text", ["12+7=", "user", "é∑ 漢\t\n", "<|im_start|>assistant\n"])
def test_any_text_survives_the_tokenizer(tokenizer: PreTrainedTokenizerBase, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_names_of_models(tmp_path: Path) -> None:
    assert tiny_model.resolve_model("builtin:tiny") == str(tiny_model.path())
    assert tiny_model.resolve_model(str(tiny_model.path())) == str(tiny_model.path())
    assert tiny_model.resolve_model("Qwen/Qwen2.5-Math-1.5B") == "Qwen/Qwen2.5-Math-1.5B"
    with pytest.raises(ValueError, match="builtin:tiny"):
        tiny_model.resolve_model("builtin:small")
    with pytest.raises(ValueError, match=r"no config\.json"):
        tiny_model.resolve_model(str(tmp_path))
    with pytest.raises(ValueError, match="no model folder"):
        tiny_model.resolve_model("./missing")


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_the_recipe_makes_the_shipped_files_bit_for_bit(tmp_path: Path) -> None:
    tiny_model.build(tmp_path)
    assert digests(tmp_path) == digests(tiny_model.path())


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in folder.iterdir()}
