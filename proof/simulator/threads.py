"""The threads of the real `LockClient`, in simulated time.

Each simulated thread is a greenlet of its process. One thread runs at a time, until it waits for a lock, an
event, a queue, a sleep or an answer. At random, a thread is also delayed where it reads the clock, so that
other threads overtake it there. The random numbers come from the seed of the history, so the same seed gives
the same schedule.
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

#: Probability that a thread is delayed when it reads the clock, and the maximum delay in seconds.
_DELAY_PROBABILITY, MAX_DELAY = 0.05, 0.05


class Thread(greenlet):
    """Replaces `threading.Thread`.

    :ivar process: the process to which the thread belongs.
    :ivar sender: the thread for which this one sends requests. It is another thread if `LockClient` has
        started this one to send a single request; else it is this thread.
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
        process.threads.append(self)
        self._args = args
        starter = getcurrent()
        for_one_request = name.removeprefix("dynamo-lock ")[0].isupper()
        self.sender: Thread = starter.sender if for_one_request and isinstance(starter, Thread) else self
        self._wakeup: Wakeup | None = None
        self._interrupted = False

    def start(self) -> None:
        """Start the thread."""
        self.process.call_soon(self.resume, *self._args)

    def interrupt(self) -> None:
        """Raise `KeyboardInterrupt` in the thread where it waits, as Ctrl-C does in a main thread."""
        self._interrupted = True
        if self._wakeup is not None:
            self._wakeup.wake()

    def wait(self, wakeup: Wakeup, timeout: float | None = None) -> None:
        """Let other threads run until `wakeup` wakes this one, or until `timeout` seconds have passed."""
        self._check()
        if timeout is not None:
            wakeup.timer = self.process.call_later(timeout, wakeup.wake)
        self._wakeup = wakeup
        assert self.parent is not None
        self.parent.switch()
        self._wakeup = None
        self._check()

    def delay(self, world: World) -> None:
        """Delay the thread with the probability `_DELAY_PROBABILITY`, so that other threads overtake it."""
        if self.process.alive and world.random.random() < _DELAY_PROBABILITY:
            begun = world.now
            self.wait(Wakeup(self), world.random.random() * MAX_DELAY)
            self.process.pauses.append((begun, world.now))

    def resume(self, *arguments: Any) -> None:
        """Run the thread until it waits again."""
        self.parent = getcurrent()
        self.switch(*arguments)

    def end(self) -> None:
        """End the thread where it waits. Its process must be dead, so that it cannot wait again."""
        self.parent = getcurrent()
        self.throw()

    def _check(self) -> None:
        """End the thread if its process was killed, and raise `KeyboardInterrupt` if it was interrupted."""
        if not self.process.alive:
            raise GreenletExit
        if self._interrupted:
            self._interrupted = False
            raise KeyboardInterrupt


class Wakeup:
    """Ends one wait of a thread, once.

    :ivar timer: the timeout of the wait, if it has one.
    :ivar woken: whether the wait has ended.
    """

    def __init__(self, thread: Thread) -> None:
        self.thread = thread
        self.timer: Handle | None = None
        self.woken = False

    def wake(self) -> None:
        """Resume the thread, unless it was woken before."""
        if not self.woken:
            self.woken = True
            if self.timer is not None:
                self.timer.cancel()
            self.thread.process.call_soon(self.thread.resume)


class _Waitable:
    """Base class of the objects that threads wait for."""

    def __init__(self) -> None:
        self._wakeups: deque[Wakeup] = deque()

    def _wait(self, timeout: float | None = None) -> None:
        """Let the present thread wait until `_wake` is called, or for `timeout` seconds."""
        thread = getcurrent()
        assert isinstance(thread, Thread), "only a simulated thread can wait"
        wakeup = Wakeup(thread)
        self._wakeups.append(wakeup)
        thread.wait(wakeup, timeout)

    def _wake(self) -> None:
        """Wake all threads that wait."""
        while self._wakeups:
            self._wakeups.popleft().wake()


class Event(_Waitable):
    """Replaces `threading.Event`."""

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


class Lock(_Waitable):
    """Replaces `threading.Lock`."""

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


class SimpleQueue(_Waitable):
    """Replaces `queue.SimpleQueue`."""

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


def sleep(seconds: float) -> None:
    """Replaces `time.sleep`."""
    thread = getcurrent()
    assert isinstance(thread, Thread)
    thread.wait(Wakeup(thread), seconds)


@contextmanager
def simulated(world: World) -> Iterator[None]:
    """Patch the package so that `LockClient` uses the simulated threads, events, locks, queues and sleeps.

    At the end, end all threads. Garbage collection does not see what a suspended greenlet refers to, so a
    thread that still waited would keep the objects of the whole history in memory.
    """
    threading = SimpleNamespace(Thread=Thread, Event=Event, Lock=Lock)
    world.on_clock = _delay
    with (
        patch.object(threads, "threading", threading),
        patch.object(claims, "threading", threading),
        patch.object(threads, "SimpleQueue", SimpleQueue),
        patch.object(threads, "time", SimpleNamespace(sleep=sleep)),
    ):
        yield
        for process in world.processes:
            process.alive = False
            for thread in process.threads:
                thread.end()


def _delay(world: World) -> None:
    thread = getcurrent()
    if isinstance(thread, Thread):
        thread.delay(world)


class _Boto3:
    """A boto3 client: the simulated SDK with blocking methods."""

    def __init__(self, network: Network, process: Process) -> None:
        self._network, self._process = network, process

    def __getattr__(self, method: str) -> Callable[..., Any]:
        def call(**params: Any) -> Any:
            thread = getcurrent()
            assert isinstance(thread, Thread)
            sdk = Sdk(self._network, self._process, sender=thread.sender)
            wakeup = Wakeup(thread)
            task = self._process.create_task(getattr(sdk, method)(**params))

            def answered(_: object) -> None:
                task.exception()  # an interrupted thread does not read it, and asyncio would report that
                wakeup.wake()

            task.add_done_callback(answered)
            thread.wait(wakeup)
            return task.result()

        return call


class Threaded:
    """A `LockClient` that coroutines of a history can use like an `AsyncLockClient`.

    Each call runs in a thread of the process, and the coroutine awaits its end. If the coroutine is
    cancelled, it interrupts the thread and waits until the thread has cleaned up.

    :ivar client: the `LockClient`, for code that runs in threads of its own.
    :ivar returned: true time at which `LockClient.lock` last returned a lease. The coroutine that awaits the
        lease may continue later, because the process may be paused in between.
    """

    def __init__(self, network: Network, process: Process, **settings: Any) -> None:
        self._process = process
        self.returned = 0.0
        sdk = _Boto3(network, process)
        streams = sdk if network.stream is not None else None
        self.client: Any = LockClient(sdk, streams=streams, **settings)

    async def renew(self, *arguments: Any, **options: Any) -> Any:
        """Call `LockClient.renew`."""
        return await self._in_thread(lambda: self.client.renew(*arguments, **options))

    async def wait(self, *arguments: Any, **options: Any) -> Any:
        """Call `LockClient.wait`."""
        return await self._in_thread(lambda: self.client.wait(*arguments, **options))

    @asynccontextmanager
    async def lock(self, wanted: Any, **claim: Any) -> AsyncIterator[Any]:
        """Hold `LockClient.lock` for the length of the ``async with`` block."""
        entered, leave = self._process.create_future(), Event()

        def hold() -> None:
            with self.client.lock(wanted, **claim) as held:
                entered.set_result((held, self._process.true_now))
                leave.wait()

        thread, ended = self._start(hold)
        await self._until(asyncio.wait([entered, ended], return_when=asyncio.FIRST_COMPLETED), thread, ended)
        if not entered.done():
            ended.result()  # raises the error of `LockClient.lock`
        held, self.returned = entered.result()
        try:
            yield held
        except GeneratorExit:  # garbage collection of a killed process
            raise
        except BaseException:
            await self._interrupt(thread, ended)
            raise
        leave.set()
        await self._until(asyncio.shield(ended), thread, ended)

    async def _in_thread(self, work: Callable[[], Any]) -> Any:
        """Call a function in a new thread, and await its result."""
        thread, ended = self._start(work)
        return await self._until(asyncio.shield(ended), thread, ended)

    def _start(self, work: Callable[[], Any]) -> tuple[Thread, asyncio.Future[Any]]:
        """Call a function in a new thread. Returns the thread and the future of the result."""
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
        """Await an event of a thread. On cancellation, interrupt the thread."""
        try:
            return await event
        except asyncio.CancelledError:
            await self._interrupt(thread, ended)
            raise

    async def _interrupt(self, thread: Thread, ended: asyncio.Future[Any]) -> None:
        """Interrupt a thread and wait until it has ended."""
        thread.interrupt()
        await asyncio.wait([ended])
        ended.exception()  # read, or asyncio would report it
