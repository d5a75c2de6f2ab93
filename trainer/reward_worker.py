"""The process that a reward function runs in, and the handle on it: what hangs here can be killed.

A thread can't be ended from outside, and a reward that loops forever would take Python's lock from the rollout loop.
Several reward functions are several processes, so they also score at the same time.

    python -m bucket_grpo.trainer.reward_worker FD SPEC     # started by RewardProcess only
"""

import asyncio
import importlib
import importlib.util
import inspect
import os
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 120  # a user's module may import torch


class RewardFailed(RuntimeError):
    """The function could not be loaded, raised, hung, or its process died. The message is one line."""


class RewardProcess:
    """One reward function in a process of its own, started at the first use and again after it was killed."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self._process: subprocess.Popen[bytes] | None = None
        self._connection: Connection | None = None

    def start(self) -> None:
        """Load the function. Raises `RewardFailed` with what is wrong with it."""
        if self._process is not None:
            return
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "bucket_grpo.trainer.reward_worker", str(theirs.fileno()), self.spec],
                stdin=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
            )
        self._connection = Connection(ours.detach())
        self._answer(START_TIMEOUT_S)

    def call(self, arguments: dict[str, Any], timeout_s: float) -> Any:
        """What the function returns for `arguments`. Raises `RewardFailed`; a function that hung is killed."""
        self.start()
        assert self._connection is not None
        try:
            self._connection.send(arguments)
        except OSError:
            self._died()
        return self._answer(timeout_s)

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
        if self._connection is not None:
            self._connection.close()
        self._process = self._connection = None

    def _answer(self, timeout_s: float) -> Any:
        assert self._connection is not None
        if not self._connection.poll(timeout_s):
            self.stop()
            raise RewardFailed(f"no answer within {timeout_s:g} s")
        try:
            ok, value = self._connection.recv()
        except (EOFError, OSError):
            self._died()
        if not ok:
            raise RewardFailed(value)
        return value

    def _died(self) -> None:
        assert self._process is not None
        try:
            status: int | str = self._process.wait(5)
        except subprocess.TimeoutExpired:
            status = "?"
        self.stop()
        raise RewardFailed(f"its process ended (status {status}); see the log")


def load_function(spec: str) -> Callable[..., Any]:
    """The function that `module:function` or `path/to/file.py:function` names."""
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise ValueError(f"write module:function or ./file.py:function, not {spec!r}")
    if place.endswith(".py"):
        path = Path(place).expanduser().resolve()
        if not path.is_file():
            raise ValueError(f"there is no file {path}")
        sys.path.insert(0, str(path.parent))  # so that it can import its neighbours
        module_spec = importlib.util.spec_from_file_location(path.stem, path)
        if module_spec is None or module_spec.loader is None:
            raise ValueError(f"{path} is not a Python file")
        module = importlib.util.module_from_spec(module_spec)
        sys.modules[path.stem] = module
        module_spec.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    function = getattr(module, name, None)
    if not callable(function):
        own = [n for n, v in vars(module).items() if inspect.isfunction(v) and not n.startswith("_")]
        raise ValueError(f"{place} has no function {name}; it has {', '.join(own) or 'none'}")
    return function


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    try:
        function = load_function(sys.argv[2])
    except BaseException as error:
        connection.send((False, _in_one_line(error)))
        raise
    connection.send((True, None))
    with asyncio.Runner() as runner:
        while True:
            try:
                arguments = connection.recv()
            except (EOFError, OSError):
                return
            connection.send(_result(function, arguments, runner))


def _result(function: Callable[..., Any], arguments: dict[str, Any], runner: asyncio.Runner) -> tuple[bool, Any]:
    """`(True, rewards)` as plain numbers and None, or `(False, what went wrong)`."""
    try:
        returned = function(**arguments)
        if inspect.iscoroutine(returned):
            returned = runner.run(returned)
        rewards = [None if reward is None else float(reward) for reward in returned]
    except Exception as error:  # noqa: BLE001  the guard counts it and stops the run when there are too many
        traceback.print_exc()
        return False, _in_one_line(error)
    return True, rewards


def _in_one_line(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {' '.join(str(error).split())}{where}"


def _end_with_parent(parent: int) -> None:
    """A function in an endless loop never sees its pipe end. (The kernel's death signal follows a thread, not us.)"""
    while os.getppid() == parent:
        time.sleep(1)
    os._exit(1)


if __name__ == "__main__":
    main()
