"""What the triggers of a process share: the settings of connections, and the clients.

To look up a connection, a trigger sends several requests to the triggerer's supervisor, one of them to mask its
secrets. The supervisor answers one request in each of its loops, which also query Airflow's database.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from airflow_dynamo_lock.airflow.versions import in_thread
from airflow_dynamo_lock.client.clock import monotonic

if TYPE_CHECKING:
    from airflow_dynamo_lock.client.async_client import AsyncLockClient

T = TypeVar("T")

#: For how long a result is used, in seconds. A changed connection takes effect in new triggers within this time.
KEPT_SECONDS = 60.0
#: How long an unused client stays open, in seconds, for the next run of a DAG. Its idle network connections are closed
#: within seconds.
IDLE_SECONDS = 600.0


@dataclass
class SharedLookups(Generic[T]):
    """The look-ups of an event loop, by name.

    Results are kept, errors are not. Callers that ask for a name at the same time share one look-up.
    """

    # Name → start of the look-up in monotonic seconds, and the look-up. All are of the same event loop.
    _begun: dict[str, tuple[float, asyncio.Future[T]]] = field(default_factory=dict)

    async def get(self, name: str, look_up: Callable[[], T]) -> T:
        """Return the result for a name, if its look-up began in the last `KEPT_SECONDS`. Otherwise look it up.

        :param look_up: function that looks it up. It may block, and runs in a thread.
        """
        loop, now = asyncio.get_running_loop(), monotonic()
        self._begun = {
            each: (begun, lookup)
            for each, (begun, lookup) in self._begun.items()
            if now - begun < KEPT_SECONDS and lookup.get_loop() is loop and not _has_failed(lookup)
        }
        if name not in self._begun:
            self._begun[name] = now, asyncio.ensure_future(in_thread(look_up))
        # Shielded: cancelling one caller must not cancel the look-up of the others.
        return await asyncio.shield(self._begun[name][1])

    def forget(self) -> None:
        """Forget all look-ups, so that the next callers begin new ones."""
        self._begun = {}


class SharedClient:
    """An asynchronous client that several triggers use at the same time.

    It is created in the background, and closed when it was unused for `IDLE_SECONDS`.

    :param create: creates the client, which is closed with the stack that it receives.
    :param retire: called with this object just before the client is closed, so that no trigger starts to use it.
    """

    def __init__(
        self,
        create: Callable[[AsyncExitStack], Coroutine[Any, Any, AsyncLockClient]],
        retire: Callable[[SharedClient], object],
    ) -> None:
        self._retire = retire
        self._users = 0
        self._stack = AsyncExitStack()
        self._closing: asyncio.Task[None] | None = None
        #: Finishes with the client, or with the error of its creation.
        self.client = asyncio.ensure_future(create(self._stack))

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Keep the client open during this context."""
        self._users += 1
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._closing = asyncio.ensure_future(self._close_when_idle())

    async def _close_when_idle(self) -> None:
        """Close the client after `IDLE_SECONDS`, unless `in_use` cancels this. If its creation failed, close at once,
        so that the next trigger creates a new one."""
        try:
            await asyncio.sleep(0 if _has_failed(self.client) else IDLE_SECONDS)
        except asyncio.CancelledError:
            if self._closing is not asyncio.current_task():
                return  # `in_use` has cancelled this, even if that use has already ended
            # Otherwise the event loop is shutting down: close at once.
        self._retire(self)
        await asyncio.gather(self.client, return_exceptions=True)
        await self._stack.aclose()


def _has_failed(future: asyncio.Future[Any]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)
