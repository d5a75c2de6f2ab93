r"""Reward functions, in TRL's form: lists with an entry per completion in, a number (or None: can't tell) for each out.

They get `completions` (lists of chat messages), `prompts`, `completion_ids`, each further column of the dataset by its
name, and `finished`: whether the completion ended by itself. They run in a process of their own (see `reward_worker`),
so this module imports nothing heavy.
"""

import re
import threading
from typing import Any

Completions = list[list[dict[str, str]]]

SAMPLE_TIMEOUT_S = 3  # for one comparison of two formulas


def exact_match(completions: Completions, gold: list[str], **_columns: Any) -> list[float]:
    """1 where the completion is the gold answer, up to white space around it."""
    return [float(_text(c).strip() == g.strip()) for c, g in zip(completions, gold, strict=True)]


def boxed_math(
    completions: Completions, gold: list[str], finished: list[bool] | None = None, **_columns: Any
) -> list[float]:
    r"""1 where the last `\boxed{…}` equals the gold answer as mathematics, and the completion ended by itself."""
    finished = finished or [True] * len(completions)
    return [
        float(ended and same_answer(last_boxed(_text(c)), g))
        for c, g, ended in zip(completions, gold, finished, strict=True)
    ]


def boxed_format(completions: Completions, finished: list[bool] | None = None, **_columns: Any) -> list[float]:
    r"""1 where the completion ended by itself and holds exactly one `\boxed{…}` that is not empty."""
    finished = finished or [True] * len(completions)
    return [
        float(ended and _text(c).count("\\boxed") == 1 and bool((last_boxed(_text(c)) or "").strip()))
        for c, ended in zip(completions, finished, strict=True)
    ]


def last_boxed(text: str) -> str | None:
    r"""What stands in the last complete `\boxed{…}` (or `\fbox{…}`), braces balanced; None if there is none."""
    for match in reversed(list(re.finditer(r"\\(?:boxed|fbox)\s*\{", text))):
        depth = 1
        for end in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return text[match.end() : end]
    return None


def same_answer(answer: str | None, gold: str) -> bool:
    """Equal after normalisation, or equal as mathematics. An answer that takes too long to compare is wrong."""
    if answer is None:
        return False
    if normalise(answer) == normalise(gold):
        return True
    from math_verify import verify

    timeout_s = _alarm_timeout_s()
    parsed_gold, parsed_answer = _parse(gold, timeout_s), _parse(answer, timeout_s)
    return bool(parsed_gold and parsed_answer and verify(parsed_gold, parsed_answer, timeout_seconds=timeout_s))


def normalise(answer: str) -> str:
    r"""One spelling for a short answer: without spacing, `\text{}`, `\left`, degrees, percent and currency signs."""
    text = answer.strip().strip("$").rstrip(".")
    text = re.sub(r"\\(?:text|mathrm|textbf|mbox)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\\(?:left|right|,|!|;|:|\s)|\\\$|\^\\circ|\^\{\\circ\}|\\%|%", "", text)
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac")
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    return re.sub(r"\s+", "", text)


def is_mathematics(gold: str) -> bool:
    """Whether a gold answer can be compared as mathematics at all."""
    return bool(_parse(gold, _alarm_timeout_s(), fallback_mode="no_fallback"))


def _parse(answer: str, timeout_s: int | None, **how: Any) -> list[Any]:
    from math_verify import parse

    found: list[Any] = parse(f"\\boxed{{{answer}}}", parsing_timeout=timeout_s, **how)
    return found


def _alarm_timeout_s() -> int | None:
    """math-verify bounds a comparison by SIGALRM, which only the main thread may use; elsewhere the caller must."""
    return SAMPLE_TIMEOUT_S if threading.current_thread() is threading.main_thread() else None


def _text(completion: list[dict[str, str]]) -> str:
    return completion[-1]["content"]
