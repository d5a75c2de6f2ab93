"""Blocking calls beside the event loop, in threads that the process does not wait for when it ends.

asyncio's own executor joins its threads at exit; one that hangs in a dead mount would keep the whole agent alive.
"""

import asyncio
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def in_thread(operation: Callable[[], Result]) -> Result:
    """The result of `operation`, or what it raised. If the awaiting task is cancelled, the thread is abandoned."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        try:
            result, error = operation(), None
        except BaseException as raised:  # noqa: BLE001 - raised again in the awaiting task
            result, error = None, raised
        if not loop.is_closed():
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=work, daemon=True, name="agent-io").start()
    return await future
