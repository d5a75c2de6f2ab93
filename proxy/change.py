"""Wake every task that waits for the next change."""

import asyncio


class Signal:
    """`fire` wakes all that wait now; a later `wait` waits for the next one."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def fire(self) -> None:
        waiters, self._waiters = self._waiters, set()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def wait(self, timeout_s: float) -> bool:
        """True when fired, False after `timeout_s`."""
        if timeout_s <= 0:
            return False
        loop = asyncio.get_running_loop()
        waiter: asyncio.Future[None] = loop.create_future()
        self._waiters.add(waiter)
        timer = loop.call_later(timeout_s, waiter.cancel)
        try:
            await waiter
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            return False
        finally:
            timer.cancel()
            self._waiters.discard(waiter)
        return True
