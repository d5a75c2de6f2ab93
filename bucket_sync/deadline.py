"""A time limit for calls that have none: a FUSE read whose other side hangs, a transfer without a timeout."""

import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def with_deadline(operation: Callable[[], Result], limit_s: float) -> Result:
    """Run `operation` in a thread; raises `TimeoutError` if it has not ended in time, and abandons the thread."""
    outcome: dict[str, Result | BaseException] = {}

    def work() -> None:
        try:
            outcome["result"] = operation()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            outcome["error"] = error

    thread = threading.Thread(target=work, daemon=True, name="deadline")
    thread.start()
    thread.join(limit_s)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {limit_s:.1f} s")
    if "error" in outcome:
        raise outcome["error"]  # type: ignore[misc]
    return outcome["result"]  # type: ignore[return-value]
