"""From the run file's `reward_funcs` to callables for TRL that neither hang nor hide what fails.

A group whose reward hangs or raises gets None from that function: TRL leaves the function out for that group, and with
no other reward the group trains nothing. Each failure is a line in the failure log; more than the run file allows stop
the run with the last cause.
"""

import json
import time
from pathlib import Path
from typing import Any

from bucket_grpo.trainer.reward_worker import RewardFailed, RewardProcess
from bucket_grpo.trainer.run_file import RunFile, RunFileError

ALL_OF_FIRST = 3  # a function that has never worked is not worth more groups than this
JUDGED_FROM = 20  # groups, before a fraction says much


class TooManyRewardFailures(RuntimeError):
    """A reward function fails too often to train on. The message names it, the figures and the last cause."""


class GuardedReward:
    """One reward function for TRL: picklable, weighted, bounded in time, its failures counted.

    Args:
        spec: `module:function` or `/path/file.py:function`; plain or async.
        weight: factor on each reward; TRL adds the functions up, and its `rewards/<name>` shows the weighted value.
        timeout_s: for one call, that is one group.
        max_failed_frac: fraction of groups that may fail.
        max_completion_length: tokens; a shorter completion ended by itself (`finished`).
        max_calls_per_s: rate limit, for functions that ask a service.
        failure_log: JSON lines, one per failed group.
    """

    def __init__(
        self,
        spec: str,
        *,
        weight: float = 1.0,
        timeout_s: float = 60.0,
        max_failed_frac: float = 0.1,
        max_completion_length: int,
        max_calls_per_s: float | None = None,
        failure_log: Path | None = None,
    ) -> None:
        self.spec = spec
        self.__name__ = spec.rpartition(":")[2]
        self.weight = weight
        self.timeout_s = timeout_s
        self.max_failed_frac = max_failed_frac
        self.max_completion_length = max_completion_length
        self.min_interval_s = 1 / max_calls_per_s if max_calls_per_s else 0.0
        self.failure_log = failure_log
        self.calls = 0
        self.failed = 0
        self._next_call = 0.0
        self._process = RewardProcess(spec)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_process": None, "calls": 0, "failed": 0, "_next_call": 0.0}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._process = RewardProcess(self.spec)

    def __call__(
        self,
        completions: list[Any],
        prompts: list[Any],
        completion_ids: list[list[int]],
        **columns: Any,
    ) -> list[float | None]:
        self.calls += 1
        try:
            rewards = self.score(completions, prompts, completion_ids, **columns)
        except RewardFailed as error:
            self._count(error, prompts)
            return [None] * len(completions)
        return [None if reward is None else self.weight * reward for reward in rewards]

    def score(
        self,
        completions: list[Any],
        prompts: list[Any],
        completion_ids: list[list[int]],
        **columns: Any,
    ) -> list[float | None]:
        """The function's own rewards, without weight. Raises `RewardFailed`."""
        self._keep_rate()
        finished = [len(ids) < self.max_completion_length for ids in completion_ids]
        arguments = {"finished": finished, **columns}
        arguments |= {"completions": completions, "prompts": prompts, "completion_ids": completion_ids}
        rewards: list[float | None] = self._process.call(arguments, self.timeout_s)
        if len(rewards) != len(completions):
            raise RewardFailed(f"returned {len(rewards)} rewards for {len(completions)} completions")
        return rewards

    def load(self) -> None:
        """Import the function now. Raises `RewardFailed` with what is wrong with it."""
        self._process.start()

    def stop(self) -> None:
        self._process.stop()

    def _keep_rate(self) -> None:
        time.sleep(max(0.0, self._next_call - time.monotonic()))
        self._next_call = time.monotonic() + self.min_interval_s

    def _count(self, error: RewardFailed, prompts: list[Any]) -> None:
        self.failed += 1
        if self.failure_log is not None:
            entry = {"time": time.time(), "reward": self.__name__, "error": str(error), "prompt": prompts[0]}
            with open(self.failure_log, "a") as log:
                log.write(json.dumps(entry, default=str) + "\n")
        never_worked = self.failed == self.calls and self.calls >= ALL_OF_FIRST
        if never_worked or (self.calls >= JUDGED_FROM and self.failed > self.max_failed_frac * self.calls):
            self.stop()
            raise TooManyRewardFailures(
                f"reward {self.spec} failed for {self.failed} of {self.calls} groups "
                f"(max_failed_reward_frac is {self.max_failed_frac:g}); the last time: {error}"
            )


def load_rewards(run: RunFile, failure_log: Path | None = None) -> list[GuardedReward]:
    """The run file's reward functions, each imported once to see that it can be.

    Raises `RunFileError` naming the function and what is wrong with it.
    """
    weights = run.reward_weights or [1.0] * len(run.reward_funcs)
    rewards = [
        GuardedReward(
            spec,
            weight=weight,
            timeout_s=run.reward_timeout_s,
            max_failed_frac=run.max_failed_reward_frac,
            max_completion_length=run.max_completion_length,
            max_calls_per_s=run.reward_max_calls_per_s,
            failure_log=failure_log,
        )
        for spec, weight in zip(run.reward_funcs, weights, strict=True)
    ]
    for reward in rewards:
        try:
            reward.load()
        except RewardFailed as error:
            raise RunFileError(f"reward_funcs: {reward.spec}: {error}") from error
        finally:
            reward.stop()
    return rewards


def try_rewards(rewards: list[GuardedReward], row: dict[str, Any]) -> None:
    """Score one empty completion of one row of the dataset: a missing column shows before anything is generated.

    Raises `RunFileError` naming the function and what it raised.
    """
    columns = {name: [value] for name, value in row.items() if name not in ("prompt", "completion", "completion_ids")}
    for reward in rewards:
        try:
            reward.score([[{"role": "assistant", "content": ""}]], [row["prompt"]], [[]], **columns)
        except RewardFailed as error:
            raise RunFileError(
                f"reward_funcs: {reward.spec} fails on an empty completion of the first row "
                f"(columns: {', '.join(row)}): {error}"
            ) from error
        finally:
            reward.stop()
