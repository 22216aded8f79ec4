"""The real guard of a guarded task, in simulated time.

The task's code runs in the main thread of a simulated process. The guard's heartbeats, its monitor and its stop run
in further simulated threads (`threads`). A signal raises in the main thread where it waits.

The guard's module is loaded a second time, as `GUARD`. Its clock, threads and signals are those of the simulation,
and so are the functions that ask Airflow about the task. So a history needs no Airflow, and changes nothing in a
process that has loaded it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from greenlet import GreenletExit, getcurrent

from airflow_dynamo_lock import airflow
from airflow_dynamo_lock.core.model.errors import LockError
from airflow_dynamo_lock.core.model.lease import Lease
from proof.simulator.threads import Event, Lock, Thread, sleep
from proof.simulator.world import Process

if TYPE_CHECKING:
    from proof.simulator.history import History

#: What the code of a task catches, by the kind of the task: nothing; all that `except Exception` catches; everything.
CATCHES: dict[str, tuple[type[BaseException], ...]] = {
    "obedient": (),
    "stubborn": (Exception,),
    "deaf": (Exception, KeyboardInterrupt),
}
# Longest wait of a task's code, in seconds.
_LONGEST_STEP = 0.5
# Seconds for which `on_kill` of some tasks waits.
_LONG_ON_KILL = 10.0


class _MainThread(Thread):
    """The main thread of a guarded process.

    :ivar ident: as that of a `threading.Thread`.
    :ivar talks_until: true time until which it sends a request to Airflow's supervisor, which no signal interrupts.
    :ivar has_ended: whether the task's code has ended.
    """

    ident = 1

    def __init__(self, work: Callable[[], None]) -> None:
        super().__init__(target=work, name="main")
        self.has_ended = False
        self.talks_until = 0.0
        self._raised: BaseException | None = None

    def signal(self, handler: Callable[[int, Any], None]) -> None:
        """Run the handler of a signal. If it raises, the thread raises that where it waits."""
        try:
            handler(0, self)
        except BaseException as raised:
            self._raised = raised
            if self._wakeup is not None:
                self._wakeup.wake()

    def _check(self) -> None:
        super()._check()
        if self._raised is not None:
            raised, self._raised = self._raised, None
            raise raised


class _HelperThread(Thread):
    """A thread that the guard starts, and waits for."""

    def __init__(self, *, target: Callable[[], None], name: str, daemon: bool) -> None:
        self._ended = Event()

        def run() -> None:
            target()
            self._ended.set()

        super().__init__(target=run, name=name, daemon=daemon)

    def join(self, seconds: float) -> None:
        """Wait until the thread has ended, or for this time."""
        self._ended.wait(seconds)


class GuardedTask:
    """The process of one task that works under a lease.

    :param held: the lease, as an XCom transfers it.
    :param report: called when the task has succeeded, and when the guard has ended the process.
    :param releases: if the task succeeds, its process releases the lease as it exits.
    """

    def __init__(
        self,
        history: History,
        process: Process,
        held: Lease,
        report: Callable[[], None],
        *,
        releases: bool,
    ) -> None:
        rng = history.world.random
        self._history, self._process, self._held = history, process, held
        self._report, self._releases = report, releases
        self._kind = rng.choice(list(CATCHES))
        self._on_kill_takes = _LONG_ON_KILL if rng.random() < 0.3 else 0.0
        self._lasts = rng.random() * (history.lease if history.faulty else 1.0)

    async def run(self) -> None:
        """Run the process until the task has ended."""
        done = self._process.create_future()

        def work() -> None:
            try:
                self._work()
            finally:
                if self._process.alive:
                    done.set_result(None)

        _tasks[self._process] = self
        self.main_thread = _MainThread(work)
        self.main_thread.start()
        await done

    def on_kill(self) -> None:
        """Do what the operator's `on_kill` does."""
        sleep(self._on_kill_takes)

    def exit(self) -> None:
        """End the process at once, as `versions.end_process` does."""
        self._history.world.faults["process ended by its guard"] += 1
        self._history.faults.kill(self._process)
        self._report()
        raise GreenletExit

    def _work(self) -> None:
        client = self._history.connect_threads(self._process).client
        guard = GUARD.Guard(client, [self._held], self)
        try:
            guard.enter()
            with self._history.checker.using(self._process, guard.leases[0], inside=True, guarded=True):
                self._run_code()
            self._report()
            if self._releases:
                guard.release_on_exit()
        except (LockError, KeyboardInterrupt) as failure:
            self._history.world.log(f"fails: {failure}", self._process)
        finally:
            self.main_thread.has_ended = True
            if self._process.alive:
                guard.leave()  # as `atexit` does

    def _run_code(self) -> None:
        """Run the task's own code."""
        rng, process = self._history.world.random, self._process
        ends = process.true_now + self._lasts
        while (left := ends - process.true_now) > 0:
            try:
                if rng.random() < 0.1:
                    self.main_thread.talks_until = process.true_now + rng.random() * _LONGEST_STEP
                sleep(min(left, _LONGEST_STEP))
            except CATCHES[self._kind] as caught:
                self._history.world.log(f"catches {type(caught).__name__}", process)


_tasks: dict[Process, GuardedTask] = {}


def _task() -> GuardedTask:
    """The task in whose process the present thread runs."""
    thread = getcurrent()
    assert isinstance(thread, Thread)
    return _tasks[thread.process]


class _ActiveGuards:
    """The guards that have entered, of the process in which the present thread runs."""

    def __init__(self) -> None:
        self._of: dict[Process, list[Any]] = {}

    def _here(self) -> list[Any]:
        return self._of.setdefault(_task()._process, [])

    def __iter__(self) -> Iterator[Any]:
        return iter(self._here())

    def append(self, guard: Any) -> None:
        self._here().append(guard)

    def remove(self, guard: Any) -> None:
        self._here().remove(guard)


def _load() -> ModuleType:
    """Load the guard's module once more, without the modules that need Airflow."""
    source = Path(airflow.__file__).with_name("guard.py")
    spec = spec_from_file_location("proof.simulator.loaded_guard", source)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    versions: Any = ModuleType("versions")
    versions.end_process = lambda: _task().exit()
    versions.has_ended = lambda thread: thread.has_ended
    versions.is_talking_to_supervisor = lambda thread: thread.process.true_now < thread.talks_until
    versions.run_hook = lambda hook, context: hook(context)
    versions.runs_in_dag_test = lambda: False
    versions.task_runner_frame = getcurrent
    package = "airflow_dynamo_lock.airflow"
    replaced = {f"{package}.versions": versions, f"{package}.lock_options": ModuleType("lock_options")}
    with patch.dict(sys.modules, replaced):
        spec.loader.exec_module(module)
    return module


#: The guard's module.
GUARD: Any = _load()
sys.modules[GUARD.__name__] = GUARD


@contextmanager
def simulated() -> Iterator[None]:
    """Patch the loaded module for one history."""
    numbers = iter(range(10**9))
    signals: Any = SimpleNamespace(
        signal=lambda *_: None,
        getsignal=lambda _: GUARD._on_signal,
        pthread_kill=lambda *_: _task().main_thread.signal(GUARD._on_signal),
    )
    instead = {
        "threading": SimpleNamespace(
            Thread=_HelperThread,
            Lock=Lock,
            current_thread=getcurrent,
            main_thread=lambda: _task().main_thread,
        ),
        "signal": signals,
        "time": SimpleNamespace(sleep=sleep),
        "atexit": SimpleNamespace(register=lambda _: None, unregister=lambda _: None),
        "os": SimpleNamespace(getpid=lambda: 1),
        "socket": SimpleNamespace(gethostname=lambda: _task()._process.name),
        "uuid": SimpleNamespace(uuid4=lambda: SimpleNamespace(hex=f"{next(numbers):08}")),
        "_active_guards": _ActiveGuards(),
    }
    with patch.multiple(GUARD, **instead):
        try:
            yield
        finally:
            _tasks.clear()
