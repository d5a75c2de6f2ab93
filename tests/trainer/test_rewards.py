r"""What rewards score, and what becomes of the ones that hang, raise or can't be loaded."""

import json
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bucket_grpo.trainer.reward_guard import GuardedReward, TooManyRewardFailures, load_rewards, try_rewards
from bucket_grpo.trainer.reward_worker import RewardFailed
from bucket_grpo.trainer.rewards import boxed_format, boxed_math, exact_match, last_boxed, same_answer
from bucket_grpo.trainer.run_file import RunFile, RunFileError

USER_FILE = '''
import asyncio, os, sys, time

from neighbour import LENGTH_LIMIT

def brevity(completions, **columns):
    """Shorter is better."""
    return [float(len(c[-1]["content"]) < LENGTH_LIMIT) for c in completions]

async def judged(completions, gold, **columns):
    await asyncio.sleep(0.01)
    return [None if g == "?" else float(c[-1]["content"] == g) for c, g in zip(completions, gold)]

def sometimes(completions, gold, **columns):
    if gold[0] == "hang":
        while True:
            pass
    if gold[0] == "raise":
        raise ZeroDivisionError("no such gold")
    if gold[0] == "die":
        os._exit(3)
    if gold[0] == "short":
        return [1.0]
    print("a print is no answer")
    return [1.0] * len(completions)

def seen(completions, finished, prompts, completion_ids, gold, level, **columns):
    return [float(f) + 10 * lv for f, lv in zip(finished, level)]
'''


def said(*texts: str) -> list[list[dict[str, str]]]:
    return [[{"role": "assistant", "content": text}] for text in texts]


def call(reward: GuardedReward, texts: list[str], gold: list[str], **columns: Any) -> list[float | None]:
    """As TRL calls it, for one group."""
    prompts = [[{"role": "user", "content": "?"}]] * len(texts)
    return reward(said(*texts), prompts, [[1]] * len(texts), gold=gold, **columns)


@pytest.fixture
def user_file(tmp_path: Path) -> Path:
    (tmp_path / "neighbour.py").write_text("LENGTH_LIMIT = 5\n")
    path = tmp_path / "my_rewards.py"
    path.write_text(USER_FILE)
    return path


@pytest.fixture
def sometimes(user_file: Path, tmp_path: Path) -> Iterator[GuardedReward]:
    reward = GuardedReward(
        f"{user_file}:sometimes",
        timeout_s=1.0,
        max_failed_frac=0.2,
        max_completion_length=8,
        failure_log=tmp_path / "failures.jsonl",
    )
    yield reward
    reward.stop()


def run_with(path: Path, *specs: str, **more: Any) -> RunFile:
    run = {"run_name": "r", "model_name_or_path": "m", "dataset_name": "d", "reward_funcs": list(specs), **more}
    (path / "run.yaml").write_text(json.dumps(run))
    return RunFile.load(path / "run.yaml")


def test_exact_match_ignores_only_the_space_around() -> None:
    assert exact_match(said("19", " 19\n", "190", ""), gold=["19"] * 4) == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("text", "inside"),
    [
        (r"so \boxed{3}, no, \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"\boxed {\{1,2\}} done", r"\{1,2\}"),
        (r"\boxed{1} and then \boxed{2", "1"),  # cut off in the middle of the second
        (r"\fbox{7}", "7"),
        ("no box", None),
        (r"\boxed{", None),
    ],
)
def test_the_last_complete_box_is_read(text: str, inside: str | None) -> None:
    assert last_boxed(text) == inside


@pytest.mark.parametrize(
    ("answer", "gold", "equal"),
    [
        ("1/2", r"\frac{1}{2}", True),
        (r"\dfrac12", r"\frac{1}{2}", True),
        ("0.5", r"\frac{1}{2}", True),
        (r"x^2+2x+1", r"(x+1)^2", True),
        (r"\text{east}", "east", True),
        ("1,000", "1000", True),
        (r"90^\circ", "90", True),
        (r"\{1,2\}", r"\{2,1\}", True),
        ("(1,2)", "(2,1)", False),
        ("12", "13", False),
        ("", "0", False),
        (r"\frac{1}{", r"\frac{1}{2}", False),
    ],
)
def test_answers_are_compared_as_mathematics(answer: str, gold: str, equal: bool) -> None:
    assert same_answer(answer, gold) is equal


def test_boxed_math_wants_a_right_answer_and_an_end() -> None:
    texts = [r"\boxed{1/2}", r"\boxed{1/2}", r"\boxed{2}", "0.5"]
    rewards = boxed_math(said(*texts), gold=[r"\frac12"] * 4, finished=[True, False, True, True])
    assert rewards == [1.0, 0.0, 0.0, 0.0]


def test_off_the_main_thread_it_scores_the_same() -> None:
    """math-verify's own time-out needs the main thread; elsewhere it would score every answer 0."""
    scores: list[list[float]] = []
    thread = threading.Thread(target=lambda: scores.append(boxed_math(said(r"\boxed{0.5}"), gold=[r"\frac12"])))
    thread.start()
    thread.join(60)
    assert scores == [[1.0]]


def test_format_wants_one_box_with_something_in_it() -> None:
    assert boxed_format(said(r"\boxed{1}", r"\boxed{}", r"\boxed{1} \boxed{2}", "1")) == [1.0, 0.0, 0.0, 0.0]


def test_a_users_file_its_neighbours_and_weights(user_file: Path, tmp_path: Path) -> None:
    run = run_with(
        tmp_path,
        "bucket_grpo.trainer.rewards:exact_match",
        f"{user_file}:brevity",
        f"{user_file}:judged",
        reward_weights=[1.0, 0.2, 2.0],
    )
    rewards = pickle.loads(pickle.dumps(load_rewards(run)))  # TRL sends them to a spawned process
    try:
        assert [reward.__name__ for reward in rewards] == ["exact_match", "brevity", "judged"]
        assert [call(reward, ["19", "nineteen"], ["19", "?"]) for reward in rewards] == [
            [1.0, 0.0],
            [0.2, 0.0],
            [2.0, None],
        ]
    finally:
        for reward in rewards:
            reward.stop()


def test_a_file_is_found_beside_the_run_file_whatever_the_working_directory(user_file: Path, tmp_path: Path) -> None:
    run = run_with(tmp_path, "./my_rewards.py:brevity")
    assert [reward.spec for reward in load_rewards(run)] == [f"{user_file}:brevity"]


def test_functions_see_columns_and_which_completions_ended(user_file: Path) -> None:
    reward = GuardedReward(f"{user_file}:seen", max_completion_length=3)
    try:
        ids = [[1, 2], [1, 2, 3]]
        assert reward(said("a", "b"), [[], []], ids, gold=["", ""], level=[1, 2]) == [11.0, 20.0]
    finally:
        reward.stop()


def test_one_that_hangs_raises_dies_or_miscounts_costs_its_group_only(sometimes: GuardedReward, tmp_path: Path) -> None:
    assert call(sometimes, ["a", "b"], ["fine"] * 2) == [1.0, 1.0]
    started = time.monotonic()
    for trouble in ("hang", "raise", "die", "short"):
        assert call(sometimes, ["a", "b"], [trouble] * 2) == [None, None]
        assert call(sometimes, ["a", "b"], ["fine"] * 2) == [1.0, 1.0]
    assert time.monotonic() - started < 20
    errors = [json.loads(line)["error"] for line in (tmp_path / "failures.jsonl").read_text().splitlines()]
    assert errors[0] == "no answer within 1 s"
    assert errors[1].startswith("ZeroDivisionError: no such gold (my_rewards.py:")
    assert "status 3" in errors[2]
    assert errors[3] == "returned 1 rewards for 2 completions"


def test_too_many_failures_stop_the_run_with_the_cause(sometimes: GuardedReward) -> None:
    for i in range(19):
        call(sometimes, ["a"], ["raise" if i % 5 == 4 else "fine"])
    call(sometimes, ["a"], ["fine"])
    call(sometimes, ["a"], ["raise"])  # 4 of 21: less than the fifth that is allowed
    with pytest.raises(TooManyRewardFailures, match=r"5 of 22 groups .*ZeroDivisionError"):
        call(sometimes, ["a"], ["raise"])


def test_one_that_never_worked_stops_the_run_at_once(sometimes: GuardedReward) -> None:
    assert [call(sometimes, ["a"], ["raise"]) for _ in range(2)] == [[None], [None]]
    with pytest.raises(TooManyRewardFailures, match="3 of 3"):
        call(sometimes, ["a"], ["raise"])


def test_a_hung_function_ends_with_its_parent(user_file: Path, tmp_path: Path) -> None:
    import subprocess
    import sys

    program = f"""
import os
from bucket_grpo.trainer.reward_guard import GuardedReward
reward = GuardedReward({f"{user_file}:sometimes"!r}, timeout_s=60, max_completion_length=8)
reward.load()
print(reward._process._process.pid, flush=True)
reward([[{{"role": "assistant", "content": ""}}]], [[]], [[]], gold=["hang"])
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    worker = int(parent.stdout.readline())
    time.sleep(0.5)
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + 10
    while _alive(worker):
        assert time.monotonic() < deadline, "the reward's process outlived its parent"
        time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_service_is_not_asked_more_often_than_allowed() -> None:
    reward = GuardedReward("bucket_grpo.trainer.rewards:exact_match", max_completion_length=8, max_calls_per_s=10)
    try:
        reward.load()
        started = time.monotonic()
        for _ in range(4):
            call(reward, ["a"], ["a"])
        assert time.monotonic() - started >= 0.3
    finally:
        reward.stop()


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("exact_match", "write module:function"),
        ("no.such.module:f", "No module named 'no'"),
        ("bucket_grpo.trainer.rewards:exact", "has no function exact; it has exact_match"),
        ("./missing.py:f", "there is no file"),
        ("./broken.py:f", "SyntaxError"),
    ],
)
def test_one_that_cannot_be_loaded_is_named_at_once(tmp_path: Path, spec: str, says: str) -> None:
    (tmp_path / "broken.py").write_text("def f(:\n")
    with pytest.raises(RunFileError, match=says):
        load_rewards(run_with(tmp_path, spec))


def test_a_column_that_a_function_needs_is_missed_before_anything_is_generated(tmp_path: Path) -> None:
    rewards = load_rewards(run_with(tmp_path, "bucket_grpo.trainer.rewards:exact_match"))
    prompt = [{"role": "user", "content": "1+1="}]
    try_rewards(rewards, {"prompt": prompt, "gold": "2"})
    with pytest.raises(RunFileError, match=r"exact_match fails .*columns: prompt, answer.*'gold'"):
        try_rewards(rewards, {"prompt": prompt, "answer": "2"})


def test_no_failure_is_hidden_from_someone_who_scores_directly(sometimes: GuardedReward) -> None:
    with pytest.raises(RewardFailed, match="ZeroDivisionError"):
        sometimes.score(said("a"), [[]], [[]], gold=["raise"])


def test_trl_trains_nothing_on_a_group_whose_reward_failed(sometimes: GuardedReward) -> None:
    import asyncio
    import math

    from accelerate.state import PartialState
    from trl.experimental.async_grpo.async_rollout_worker import RolloutGroup, TrainingSequence, _AsyncRolloutLoop
    from trl.trainer.utils import get_callable_name

    PartialState(cpu=True)
    loop = object.__new__(_AsyncRolloutLoop)
    loop.reward_funcs = [sometimes]
    loop.reward_func_names = [get_callable_name(sometimes)]
    loop._env_reward_types = []

    def scored(gold: list[str]) -> list[tuple[float, float]]:
        group = RolloutGroup(
            prompts=[[{"role": "user", "content": "?"}]] * 2,
            reward_kwargs={"gold": gold},
            completions=said("a", "b"),
            completions_ids=[[1], [2]],
            completions_sequences=[[TrainingSequence([1], [1], [0.0], "r")]] * 2,
            tool_call_counts=[0, 0],
            tool_failure_counts=[0, 0],
            model_version=1,
            group_id=0,
            env_rewards=[None, None],
            rollout_rewards=[None, None],
        )
        samples = asyncio.run(loop._score_group(group))
        return [(sample.advantage, sample.metrics["rewards/sometimes"]) for sample in samples]

    assert scored(["fine", "fine"]) == [(0.0, 1.0)] * 2
    for trouble in ("hang", "raise"):
        failed = scored([trouble] * 2)
        assert [advantage for advantage, _ in failed] == [0.0, 0.0]
        assert all(math.isnan(reward) for _, reward in failed)
