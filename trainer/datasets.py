"""Training prompts: built in, from a local JSONL file, or from the Hub; checked before anything is started for them.

Out comes a dataset with `prompt` (chat messages), `gold` (text) where there is an answer to compare with, and every
other column as it was: TRL passes them all to the reward functions.
"""

import logging
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetNotFoundError

from bucket_grpo.trainer.rewards import is_mathematics
from bucket_grpo.trainer.run_file import DATA_SUFFIXES, RunFile, RunFileError
from bucket_grpo.trainer.tiny_recipe import TERMS, question

logger = logging.getLogger(__name__)

# Where the answer is looked for when the run file names no `gold_column`; a dot goes into a nested field.
GOLD_COLUMNS = ("gold", "answer", "solution", "ground_truth", "reward_model.ground_truth")
HELD_OUT_SUMS = 100
TOKENIZE_BATCH = 1000


def load_train_dataset(run: RunFile, tokenizer: Any) -> Dataset:
    """The run's training prompts, checked and shuffled by its seed.

    Raises `RunFileError` with counts and an example of each kind, when rows can't be trained on and `unusable_rows` is
    `refuse` (the default); with `drop` they are left out and logged.
    """
    return load_prompts(run, tokenizer, run.dataset_train_split).shuffle(seed=run.seed)


def load_prompts(run: RunFile, tokenizer: Any, split: str) -> Dataset:
    """One split in its own order, checked as for training."""
    rows = with_prompt_and_gold(read_rows(run, split), run)
    limit = max_prompt_tokens(run)
    lengths = list(prompt_lengths(rows, tokenizer, run.trl.get("chat_template_kwargs") or {}))
    problems = {i: problem for i in range(len(rows)) if (problem := _problem(rows[i], lengths[i], limit, run))}
    if problems:
        _report(run, rows, problems)
        rows = rows.select([i for i in range(len(rows)) if i not in problems])
    if not len(rows):
        raise RunFileError(f"dataset_name: {run.dataset_name} ({split}) has no row that can be trained on")
    logger.info("%s (%s): %d prompts, the longest of %d tokens", run.dataset_name, split, len(rows), max(lengths))
    return rows


def read_rows(run: RunFile, split: str) -> Dataset:
    """The rows as they are stored. Raises `RunFileError` for a dataset that is not there."""
    name = run.dataset_name
    if name == "builtin:addition":
        return addition(split)
    if name.startswith("builtin:"):
        raise RunFileError(f"dataset_name: unknown built-in dataset {name!r}; there is builtin:addition")
    if name.endswith(DATA_SUFFIXES):
        path = Path(name).expanduser()
        if not path.is_file():
            raise RunFileError(f"dataset_name: there is no file {path.resolve()}")
        kind = "parquet" if path.suffix == ".parquet" else "json"
        return load_dataset(kind, data_files=str(path.resolve()), split="train")
    try:
        return load_dataset(name, run.dataset_config, split=split)
    except (DatasetNotFoundError, ValueError) as error:  # ValueError: unknown configuration or split
        raise RunFileError(f"dataset_name: {name}: {' '.join(str(error).split())}") from error


def addition(split: str) -> Dataset:
    """Every sum that `builtin:tiny` knows: `train`, or the hundred held out as `test`."""
    sums = [(a, b) for a in range(TERMS) for b in range(TERMS)]
    random.Random(0).shuffle(sums)
    chosen = {"train": sums[HELD_OUT_SUMS:], "test": sums[:HELD_OUT_SUMS]}.get(split)
    if chosen is None:
        raise RunFileError(f"builtin:addition has the splits train and test, not {split!r}")
    return Dataset.from_list([{"prompt": question(a, b), "gold": str(a + b)} for a, b in chosen])


def with_prompt_and_gold(rows: Dataset, run: RunFile) -> Dataset:
    """`prompt` as chat messages, with the run file's system prompt in front, and `gold` as text.

    Raises `RunFileError` when a column is missing, naming the ones that are there.
    """
    if run.prompt_column not in rows.column_names:
        raise RunFileError(
            f"{run.dataset_name} has no column {run.prompt_column!r}; it has {', '.join(rows.column_names)}: "
            "name the right one as prompt_column"
        )
    gold = _gold_values(rows, run.gold_column)
    prompts = [_messages(prompt, run.system_prompt) for prompt in rows[run.prompt_column]]
    made = {"prompt": prompts} | ({} if gold is None else {"gold": gold})
    kept = [name for name in rows.column_names if name not in ("prompt", "gold", run.prompt_column)]
    return Dataset.from_dict(made | {name: rows[name][:] for name in kept})


def prompt_lengths(rows: Dataset, tokenizer: Any, chat_template_kwargs: dict[str, Any]) -> Iterator[int]:
    """Tokens of each prompt as it will be sent, in order."""
    for start in range(0, len(rows), TOKENIZE_BATCH):
        prompts = [list(prompt) for prompt in rows[start : start + TOKENIZE_BATCH]["prompt"]]
        encoded = tokenizer.apply_chat_template(
            prompts, add_generation_prompt=True, return_dict=False, **chat_template_kwargs
        )
        yield from map(len, encoded)


def max_prompt_tokens(run: RunFile) -> int | None:
    """Longest prompt accepted: the run file's bound, or what the context leaves beside a full completion."""
    context = run.vllm_spec.get("max_model_len")
    left = int(context) - run.max_completion_length if context else None
    if left is not None and left <= 0:
        raise RunFileError(
            f"max_completion_length {run.max_completion_length} leaves no room for a prompt in max-model-len {context}"
        )
    bounds = [bound for bound in (run.max_prompt_tokens, left) if bound is not None]
    return min(bounds, default=None)


def _problem(row: dict[str, Any], length: int, limit: int | None, run: RunFile) -> str | None:
    """Why a row can't be trained on, in words that are the same for each row of the kind."""
    if not any(message["content"].strip() for message in row["prompt"]):
        return "empty prompt"
    if limit is not None and length > limit:
        return f"prompt of more than {limit} tokens"
    if "gold" in row and not (row["gold"] or "").strip():
        return "no gold answer"
    if any(spec.endswith("rewards:boxed_math") for spec in run.reward_funcs) and not is_mathematics(row["gold"]):
        return "gold answer that math-verify can't parse"
    return None


def _report(run: RunFile, rows: Dataset, problems: dict[int, str]) -> None:
    by_kind: dict[str, list[int]] = defaultdict(list)
    for index, problem in problems.items():
        by_kind[problem].append(index)
    described = "; ".join(
        f"{len(indices)} with {kind}, e.g. row {indices[0]}: {_shortened(rows[indices[0]])}"
        for kind, indices in by_kind.items()
    )
    message = f"{run.dataset_name}: {len(problems)} of {len(rows)} rows can't be trained on: {described}"
    if run.unusable_rows == "refuse":
        raise RunFileError(f"{message}. Mend them, or set unusable_rows: drop")
    logger.warning("%s. They are left out", message)


def _shortened(row: dict[str, Any]) -> str:
    text = f"{row['prompt'][-1]['content']!r} → {row.get('gold')!r}"
    return text if len(text) <= 160 else f"{text[:100]} … {text[-50:]}"


def _messages(prompt: str | Sequence[dict[str, str]], system_prompt: str | None) -> list[dict[str, str]]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [dict(m) for m in prompt or []]
    if system_prompt is None:
        return messages
    return [{"role": "system", "content": system_prompt}, *(m for m in messages if m["role"] != "system")]


def _gold_values(rows: Dataset, column: str | None) -> list[str | None] | None:
    """The gold answers as text, or None where the dataset has none. A named column that is missing is an error."""
    for name in [column] if column else GOLD_COLUMNS:
        outer, _, inner = name.partition(".")
        if outer in rows.column_names and (not inner or inner in (rows.features[outer] or {})):
            return [_as_text(value, inner) for value in rows[outer]]
    if column:
        raise RunFileError(f"gold_column: there is no column {column!r}; there are {', '.join(rows.column_names)}")
    return None


def _as_text(value: Any, inner: str) -> str | None:
    value = value.get(inner) if inner and value is not None else value
    if isinstance(value, Iterable) and not isinstance(value, str):
        value = next(iter(value), None)  # some datasets wrap the answer in a list of one
    return None if value is None else str(value)
