"""Prompts from every source arrive in one form, and what can't be trained on is said before anything starts."""

import json
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerBase
from trl.chat_template_utils import parse_response

from bucket_grpo.trainer import datasets, tiny_model
from bucket_grpo.trainer.chat import TokenizerError, prepare_tokenizer
from bucket_grpo.trainer.run_file import RunFile, RunFileError

CHATML_WITH_SYSTEM = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nThink.<|im_end|>\n{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(tiny_model.path())


def run_on(folder: Path, rows: list[dict[str, Any]] | str, **more: Any) -> RunFile:
    if isinstance(rows, list):
        (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = {
        "run_name": "r",
        "model_name_or_path": "builtin:tiny",
        "dataset_name": rows if isinstance(rows, str) else "./data.jsonl",
        "reward_funcs": ["bucket_grpo.trainer.rewards:exact_match"],
        "max_completion_length": 8,
        **more,
    }
    (folder / "run.yaml").write_text(json.dumps(run))
    return RunFile.load(folder / "run.yaml")


def test_addition_is_every_sum_once_and_its_test_split_is_held_out(tmp_path: Path, tokenizer: Any) -> None:
    run = run_on(tmp_path, "builtin:addition")
    train, test = datasets.load_train_dataset(run, tokenizer), datasets.load_prompts(run, tokenizer, "test")
    asked = [row["prompt"][0]["content"] for row in train] + [row["prompt"][0]["content"] for row in test]
    assert len(test) == 100
    assert sorted(asked) == sorted(f"{a}+{b}=" for a in range(30) for b in range(30))
    assert all(row["gold"] == str(eval(row["prompt"][0]["content"].rstrip("="))) for row in train)


def test_the_seed_decides_the_order(tmp_path: Path, tokenizer: Any) -> None:
    orders = [
        datasets.load_train_dataset(run_on(tmp_path, "builtin:addition", seed=seed), tokenizer)["gold"][:]
        for seed in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


@pytest.mark.parametrize(
    ("row", "more", "messages", "gold"),
    [
        ({"prompt": "1+1=", "answer": 2}, {}, [("user", "1+1=")], "2"),
        ({"prompt": [{"role": "user", "content": "1+1="}], "gold": "2"}, {}, [("user", "1+1=")], "2"),
        ({"prompt": "x", "reward_model": {"style": "rule", "ground_truth": "2"}}, {}, [("user", "x")], "2"),
        ({"q": "x", "prompt": "no", "g": ["2"]}, {"prompt_column": "q", "gold_column": "g"}, [("user", "x")], "2"),
        ({"prompt": "x", "gold": "2"}, {"system_prompt": "Be short."}, [("system", "Be short."), ("user", "x")], "2"),
        ({"prompt": "x"}, {"reward_funcs": ["m:f"]}, [("user", "x")], None),
    ],
)  # fmt: skip
def test_prompts_become_chat_messages_and_answers_text(
    tmp_path: Path,
    tokenizer: Any,
    row: dict[str, Any],
    more: dict[str, Any],
    messages: list[tuple[str, str]],
    gold: str | None,
) -> None:
    (loaded,) = datasets.load_train_dataset(run_on(tmp_path, [row], **more), tokenizer)
    assert [(m["role"], m["content"]) for m in loaded["prompt"]] == messages
    assert loaded.get("gold") == gold


def test_other_columns_reach_the_rewards(tmp_path: Path, tokenizer: Any) -> None:
    (row,) = datasets.load_train_dataset(run_on(tmp_path, [{"prompt": "x", "gold": "1", "level": 3}]), tokenizer)
    assert row["level"] == 3


ROWS = [
    {"prompt": "1+1=", "gold": "2"},
    {"prompt": "9" * 60, "gold": "2"},
    {"prompt": "8" * 70, "gold": "2"},
    {"prompt": " ", "gold": "2"},
    {"prompt": "2+2=", "gold": None},
]


def test_rows_that_cannot_be_trained_on_are_counted_with_an_example(tmp_path: Path, tokenizer: Any) -> None:
    run = run_on(tmp_path, ROWS, max_prompt_tokens=40)
    with pytest.raises(RunFileError) as refused:
        datasets.load_train_dataset(run, tokenizer)
    message = str(refused.value)
    assert "4 of 5 rows" in message
    assert "2 with prompt of more than 40 tokens, e.g. row 1: '9999" in message
    assert "1 with empty prompt, e.g. row 3" in message
    assert "1 with no gold answer, e.g. row 4: '2+2='" in message
    assert "unusable_rows: drop" in message


def test_they_are_left_out_where_the_run_file_says_so(
    tmp_path: Path, tokenizer: Any, caplog: pytest.LogCaptureFixture
) -> None:
    run = run_on(tmp_path, ROWS, max_prompt_tokens=40, unusable_rows="drop")
    with caplog.at_level(logging.WARNING):
        kept = datasets.load_train_dataset(run, tokenizer)
    assert [row["gold"] for row in kept] == ["2"]
    assert "4 of 5 rows" in caplog.text
    with pytest.raises(RunFileError, match="no row that can be trained on"):
        datasets.load_train_dataset(run_on(tmp_path, ROWS[1:], max_prompt_tokens=40, unusable_rows="drop"), tokenizer)


def test_a_prompt_must_leave_room_for_a_full_completion(tmp_path: Path, tokenizer: Any) -> None:
    """The 8 template tokens, 60 digits and 8 of completion need a context of 76."""
    for context, fits in ((76, True), (75, False)):
        run = run_on(tmp_path, ROWS[1:2], jobs={"vllm": {"args": {"max-model-len": context}}})
        if fits:
            assert len(datasets.load_train_dataset(run, tokenizer)) == 1
        else:
            with pytest.raises(RunFileError, match="more than 67 tokens"):
                datasets.load_train_dataset(run, tokenizer)
    run = run_on(tmp_path, ROWS[:1], jobs={"vllm": {"args": {"max-model-len": 8}}})
    with pytest.raises(RunFileError, match="leaves no room for a prompt"):
        datasets.load_train_dataset(run, tokenizer)


def test_a_gold_that_math_verify_cannot_parse_is_refused_for_that_reward_only(tmp_path: Path, tokenizer: Any) -> None:
    rows = [{"prompt": "x", "gold": r"\frac{1}{2}"}, {"prompt": "y", "gold": r"\frac{1}{"}]
    assert len(datasets.load_train_dataset(run_on(tmp_path, rows), tokenizer)) == 2
    run = run_on(tmp_path, rows, reward_funcs=["bucket_grpo.trainer.rewards:boxed_math"])
    with pytest.raises(RunFileError, match=r"1 with gold answer that math-verify can't parse, e\.g\. row 1: 'y'"):
        datasets.load_train_dataset(run, tokenizer)


@pytest.mark.parametrize(
    ("rows", "more", "says"),
    [
        ([{"question": "x"}], {}, "no column 'prompt'; it has question: name the right one as prompt_column"),
        ([{"prompt": "x"}], {"gold_column": "gold"}, "no column 'gold'; there are prompt"),
        ("./missing.jsonl", {}, "there is no file .*missing.jsonl"),
        ("builtin:subtraction", {}, "there is builtin:addition"),
        ("builtin:addition", {"dataset_train_split": "dev"}, "has the splits train and test"),
    ],
)
def test_what_is_missing_is_named(tmp_path: Path, tokenizer: Any, rows: Any, more: dict[str, Any], says: str) -> None:
    with pytest.raises(RunFileError, match=says):
        datasets.load_train_dataset(run_on(tmp_path, rows, **more), tokenizer)


def test_an_unknown_chatml_template_gets_a_parser_that_leaves_the_answer_alone(tokenizer: Any) -> None:
    tokenizer.response_template = None
    tokenizer.chat_template = CHATML_WITH_SYSTEM
    ready = pickle.loads(pickle.dumps(prepare_tokenizer(tokenizer)))
    prompt = ready.apply_chat_template(
        [{"role": "user", "content": "?"}], add_generation_prompt=True, return_dict=False
    )
    assert parse_response(ready, ready.encode("19<|im_end|>"), prefix=prompt)["content"] == "19"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"chat_template": None}, "no chat template"),
        ({"eos_token": None}, "no eos_token"),
        ({"response_template": None, "chat_template": "{{ messages[0].content }}\nA:"}, "not ChatML"),
        (
            {"response_template": {"fields": {"content": {"content": "text"}}, "start_anchor": "user\n"}},
            "rewards would not see the answer",
        ),
    ],
)
def test_a_tokenizer_that_would_score_every_answer_0_is_refused(
    tokenizer: Any, change: dict[str, Any], says: str
) -> None:
    for name, value in change.items():
        setattr(tokenizer, name, value)
    with pytest.raises(TokenizerError, match=says):
        prepare_tokenizer(tokenizer)


def test_a_missing_pad_token_is_made_up_for(tokenizer: Any) -> None:
    tokenizer.pad_token = None
    assert prepare_tokenizer(tokenizer).pad_token == tokenizer.eos_token
