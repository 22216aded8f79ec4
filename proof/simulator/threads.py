"""The threads of the real `LockClient`, in simulated time.

Each is a greenlet of its process, and one runs at a time: until it waits for a lock, an event, a queue, the clock or an
answer. Now and then it is held up as well where it reads the clock, so that the other threads overtake it there. Chance
decides, drawn from the seed of the history, so that it can be played again exactly.
"""

from __future__ import annotations

import asyncio
from asyncio import events
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from queue import Empty
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from greenlet import GreenletExit, getcurrent, greenlet

from airflow_dynamo_lock.client import claims, threads
from airflow_dynamo_lock.client.sync_client import LockClient
from proof.simulator.network import Network, Sdk
from proof.simulator.world import Handle, Process, World

#: How likely a thread is to be held up whenever it reads the clock, and for how long at most, in seconds.
_HELD_UP, _HELD_UP_FOR = 0.05, 0.05


class Thread(greenlet):
    """In the place of `threading.Thread`.

    :ivar sender: the thread whose requests it sends; `LockClient` sends some in a thread that lives for one request.
    """

    def __init__(
        self,
        *,
        target: Callable[..., object],
        name: str,
        args: tuple[Any, ...] = (),
        daemon: bool = True,
    ) -> None:
        super().__init__(target)
        process: Any = events._get_running_loop()
        if process is None or not process.alive:
            raise GreenletExit
        self.process: Process = process
        self._args = args
        starter = getcurrent()
        for_one_request = name.removeprefix("dynamo-lock ")[0].isupper()
        self.sender: Thread = starter.sender if for_one_request and isinstance(starter, Thread) else self
        self._turn: Turn | None = None
        self._interrupted = False

    def start(self) -> None:
        self.process.call_soon(self.go_on, *self._args)

    def interrupt(self) -> None:
        """Ctrl-C, which ends whatever it waits for."""
        self._interrupted = True
        if self._turn is not None:
            self._turn.come()

    def wait(self, turn: Turn, timeout: float | None = None) -> None:
        """Let other threads run until that turn comes, or until so many seconds have passed."""
        self._check()
        if timeout is not None:
            turn.timer = self.process.call_later(timeout, turn.come)
        self._turn = turn
        assert self.parent is not None
        self.parent.switch()
        self._turn = None
        self._check()

    def hold_up(self, world: World) -> None:
        """Perhaps let other threads of the process come first."""
        if self.process.alive and world.random.random() < _HELD_UP:
            begun = world.now
            self.wait(Turn(self), world.random.random() * _HELD_UP_FOR)
            self.process.stops.append((begun, world.now))

    def go_on(self, *arguments: Any) -> None:
        """Run it until it waits again."""
        self.parent = getcurrent()
        self.switch(*arguments)

    def _check(self) -> None:
        if not self.process.alive:  # it was killed, and Python clears away what is left of its threads
            raise GreenletExit
        if self._interrupted:
            self._interrupted = False
            raise KeyboardInterrupt


class Turn:
    """What a thread waits for. It comes once."""

    def __init__(self, thread: Thread) -> None:
        self.thread = thread
        self.timer: Handle | None = None
        self.has_come = False

    def come(self) -> None:
        if not self.has_come:
            self.has_come = True
            if self.timer is not None:
                self.timer.cancel()
            self.thread.process.call_soon(self.thread.go_on)


class _Waited:
    """What threads can wait for."""

    def __init__(self) -> None:
        self._turns: deque[Turn] = deque()

    def _wait(self, timeout: float | None = None) -> None:
        thread = getcurrent()
        assert isinstance(thread, Thread), "only a thread can wait"
        turn = Turn(thread)
        self._turns.append(turn)
        thread.wait(turn, timeout)

    def _wake(self) -> None:
        while self._turns:
            self._turns.popleft().come()


class Event(_Waited):
    """In the place of `threading.Event`."""

    def __init__(self) -> None:
        super().__init__()
        self._set = False

    def is_set(self) -> bool:
        return self._set

    def set(self) -> None:
        self._set = True
        self._wake()

    def clear(self) -> None:
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        if not self._set:
            self._wait(timeout)
        return self._set


class Lock(_Waited):
    """In the place of `threading.Lock`."""

    def __init__(self) -> None:
        super().__init__()
        self._locked = False

    def __enter__(self) -> None:
        while self._locked:
            self._wait()
        self._locked = True

    def __exit__(self, *_: object) -> None:
        self._locked = False
        self._wake()


class SimpleQueue(_Waited):
    """In the place of `queue.SimpleQueue`."""

    def __init__(self) -> None:
        super().__init__()
        self._items: deque[Any] = deque()

    def empty(self) -> bool:
        return not self._items

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._wake()

    def get(self, timeout: float | None = None) -> Any:
        if not self._items:
            self._wait(timeout)
        if not self._items:
            raise Empty
        return self._items.popleft()


def _sleep(seconds: float) -> None:
    thread = getcurrent()
    assert isinstance(thread, Thread)
    thread.wait(Turn(thread), seconds)


@contextmanager
def simulated(world: World) -> Iterator[None]:
    """`LockClient` waits, and starts threads, in this world."""
    threading = SimpleNamespace(Thread=Thread, Event=Event, Lock=Lock)
    world.on_clock = _hold_up
    with (
        patch.object(threads, "threading", threading),
        patch.object(claims, "threading", threading),
        patch.object(threads, "SimpleQueue", SimpleQueue),
        patch.object(threads, "time", SimpleNamespace(sleep=_sleep)),
    ):
        yield


def _hold_up(world: World) -> None:
    thread = getcurrent()
    if isinstance(thread, Thread):
        thread.hold_up(world)


class _Boto3:
    """The SDK as a thread uses it."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network, self._process = network, process

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(**params: Any) -> Any:
            thread = getcurrent()
            assert isinstance(thread, Thread)
            sdk = Sdk(self._network, self._process, sender=thread.sender)
            turn = Turn(thread)
            task = self._process.create_task(getattr(sdk, method)(**params))

            def answered(_: object) -> None:
                task.exception()  # which nobody asks for, if the thread was interrupted
                turn.come()

            task.add_done_callback(answered)
            thread.wait(turn)
            return task.result()

        return call


class Threaded:
    """A `LockClient` for the coroutines of a history: what they await, a thread of their process does.

    Who is cancelled while he waits interrupts that thread, and waits until it has cleaned up.

    :ivar returned: when `LockClient.lock` last returned a lease, in true time. The process may be stopped, while
        another thread runs, before the coroutine that waits for it can go on.
    """

    def __init__(self, network: Network, process: Process, **settings: Any) -> None:
        self._process = process
        self.returned = 0.0
        self._client: Any = LockClient(_Boto3(network, process), **settings)

    async def renew(self, *arguments: Any, **options: Any) -> Any:
        return await self._in_thread(lambda: self._client.renew(*arguments, **options))

    async def wait(self, *arguments: Any, **options: Any) -> Any:
        return await self._in_thread(lambda: self._client.wait(*arguments, **options))

    @asynccontextmanager
    async def lock(self, wanted: Any, **claim: Any) -> AsyncIterator[Any]:
        entered, leave = self._process.create_future(), Event()

        def hold() -> None:
            with self._client.lock(wanted, **claim) as held:
                entered.set_result((held, self._process.here))
                leave.wait()

        thread, ended = self._start(hold)
        await self._until(asyncio.wait([entered, ended], return_when=asyncio.FIRST_COMPLETED), thread, ended)
        if not entered.done():
            ended.result()  # raises why
        held, self.returned = entered.result()
        try:
            yield held
        except GeneratorExit:  # Python clears away a killed process
            raise
        except BaseException:
            await self._interrupt(thread, ended)
            raise
        leave.set()
        await self._until(asyncio.shield(ended), thread, ended)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        thread, ended = self._start(work)
        return await self._until(asyncio.shield(ended), thread, ended)

    def _start(self, work: Callable[[], Any]) -> tuple[Thread, asyncio.Future[Any]]:
        ended = self._process.create_future()

        def run() -> None:
            try:
                ended.set_result(work())
            except KeyboardInterrupt:
                ended.set_result(None)
            except Exception as failure:
                ended.set_exception(failure)

        thread = Thread(target=run, name="main")
        thread.start()
        return thread, ended

    async def _until(self, event: Awaitable[Any], thread: Thread, ended: asyncio.Future[Any]) -> Any:
        try:
            return await event
        except asyncio.CancelledError:
            await self._interrupt(thread, ended)
            raise

    async def _interrupt(self, thread: Thread, ended: asyncio.Future[Any]) -> None:
        thread.interrupt()
        await asyncio.wait([ended])
        ended.exception()
