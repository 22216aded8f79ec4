"""One run: the engine, a proxy for each link, the processes, and the disasters. It returns the evidence."""

from __future__ import annotations

import itertools
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Self

from airflow_dynamo_lock import LockError
from airflow_dynamo_lock.client.clock import monotonic
from deployments.clients import lock_client
from deployments.engines import DynamoDBLocal, Engine
from deployments.proxy import Proxy, Seen
from proof.chaos import disasters, log, starvation
from proof.chaos.actors import ProcessSetup
from proof.chaos.disasters import Disaster
from proof.chaos.evidence import Evidence, Incident
from proof.chaos.exchanges import Exchanges
from proof.chaos.forkserver import ForkServer
from proof.chaos.groups import Group
from proof.chaos.records import Records
from proof.chaos.settings import CAPACITIES, GROUPS, LEASE, SKEW, Role, standing_roles

_TICK = 0.1
#: How long all roles and groups together have for one more use of the lock after the disasters, in seconds.
#: Long enough for a loaded machine.
LAST_TURNS = 90.0


class InterruptedRun(Exception):
    """The run was interrupted before its end."""


class ChaosRun:
    """One run on one engine. Leaving its ``with`` block ends all its processes and removes its files.

    :param engine: the engine to start.
    :param seed: chooses the disasters.
    :param careless: add a process that ignores the end of its lease.
    """

    def __init__(self, engine: type[Engine], seed: str, *, careless: bool = False) -> None:
        self._engine_class = engine
        self._seed = f"{seed} {engine.name}"
        self._rng = random.Random(self._seed)
        self._roles = standing_roles(self._rng, careless=careless)
        self._calm = threading.Event()
        self._ending = threading.Event()
        # Held while the dictionaries below and the incidents are changed.
        self._lock = threading.Lock()
        # Held while a disaster stops or restarts the engine.
        self._engine_lock = threading.Lock()
        self._numbers = itertools.count(1)
        # The latest process of each role. Replaced, never changed, so that other threads can iterate it.
        self._process_of: dict[str, int] = {}
        self._link_of: dict[str, str] = {}
        self._pids: dict[int, int] = {}
        self._logs: dict[int, Path] = {}
        self._incidents: list[Incident] = []
        self._failures: list[str] = []
        self._records = Records()
        self._exchanges = Exchanges()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
            data = self._folder / "data"
            data.mkdir()
            folder = data if self._engine_class is DynamoDBLocal else None
            self._engine = stack.enter_context(self._engine_class(folder=folder))
            with lock_client("sync", self._engine.endpoint_url) as client:
                client.create_table()
            links = {role.link for role in self._roles}
            links |= {f"{group}/{machine}" for group in GROUPS for machine in ("triggerer", "worker")}
            self._links = {
                link: stack.enter_context(Proxy(self._engine.endpoint_url, partial(self._on_answer, link)))
                for link in sorted(links)
            }
            self._lags = stack.enter_context(starvation.measured(lambda: self._pids))
            self._forkserver = stack.enter_context(ForkServer())
            stack.callback(self._end)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def _on_answer(self, link: str, seen: Seen, status: int, body: bytes) -> None:
        self._records.on_answer(seen, status, body)
        self._exchanges.on_answer(link, seen, status, body)

    def interrupt(self) -> None:
        """End the run: all threads stop soon, and start no more processes. `run` raises `InterruptedRun`."""
        self._ending.set()
        self._calm.set()

    def _end(self) -> None:
        self.interrupt()
        # Never released. The engine must not be restarting, or be restarted later, when the stack ends it.
        self._engine_lock.acquire()

    # -- the course of the run -------------------------------------------------------------------------------

    def run(self, duration: float) -> Evidence:
        """Cause disasters for `duration` seconds, then wait until each role has used its lock once more.

        :raises InterruptedRun: `interrupt` was called.
        """
        began = monotonic()
        groups = self._start_processes()
        running = []
        for disaster in self._plan(duration):
            self.pause(began + disaster.at - monotonic())
            if self.is_calm:
                break  # interrupted
            running.append(self._in_thread(lambda disaster=disaster: self._carry_out(disaster)))  # type: ignore[misc]
        self.pause(began + duration - monotonic())
        self._calm.set()
        for thread in running:
            thread.join()
        calm = monotonic()
        self._file("calm").touch()
        self._wait_for_last_turns(groups)
        ended = monotonic()
        if self._ending.is_set():
            raise InterruptedRun
        self._check_that_locks_are_free()
        self._check_exit_statuses()
        return self._evidence(began, calm, ended)

    def _plan(self, duration: float) -> list[Disaster]:
        roles = [role.name for role in self._roles if not role.careless]
        # Guarded processes are listed twice, so that they are chosen more often.
        programs = ("acquire", "heartbeat", "guarded", "guarded")
        roles += [f"{group}/{program}" for group in GROUPS for program in programs]
        restarts = self._engine_class is DynamoDBLocal
        return disasters.plan(self._rng, duration, links=sorted(self._links), roles=roles, restarts=restarts)

    def _start_processes(self) -> list[threading.Thread]:
        """Start the processes outside the groups, and a thread for each group."""
        for role in self._roles:
            self.start(role)
        return [
            self._in_thread(Group(self, name, random.Random(f"{self._seed} {name}")).run) for name in GROUPS
        ]

    def _wait_for_last_turns(self, groups: list[threading.Thread]) -> None:
        deadline = time.monotonic() + LAST_TURNS
        late = []
        for role in self._roles:
            remaining = max(0.0, deadline - time.monotonic())
            if self.wait_until_ended(self._process_of[role.name], within=remaining) is None:
                late.append(role.name)
        for thread, name in zip(groups, GROUPS, strict=True):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                late.append(name)
        self._failures += [
            f"{name} has not used its lock within {LAST_TURNS:g} s after the disasters" for name in late
        ]

    def _check_that_locks_are_free(self) -> None:
        """Check that a new client can acquire all slots of each lock."""
        with lock_client("sync", self._engine.endpoint_url) as client:
            for key, capacity in CAPACITIES.items():
                try:
                    lease = client.acquire(key, slots=capacity, capacity=capacity, timeout=LEASE + SKEW + 10)
                    client.release(lease)
                except LockError as failure:
                    self._failures.append(f"at the end, {key!r} cannot be acquired: {failure}")

    def _check_exit_statuses(self) -> None:
        """Check that no process was ended by a signal that this run has not sent."""
        killed = {incident.process for incident in self._incidents if incident.kind == "SIGKILL"}
        for process, path in self._logs.items():
            status = self._forkserver.exit_status(process)
            if process not in killed and status is not None and status < 0:
                self._failures.append(
                    f"{path.stem} was ended by signal {-status}, which this run has not sent"
                )

    def _evidence(self, began: float, calm: float, ended: float) -> Evidence:
        events = [event for path in self._logs.values() for event in log.read(path)]
        return Evidence(
            engine=self._engine_class.name,
            began=began,
            calm=calm,
            ended=ended,
            dated=self._engine_class is not DynamoDBLocal,
            events=sorted(events, key=lambda event: event.at),
            incidents=sorted(self._incidents, key=lambda incident: incident.begin),
            histories=self._records.histories(),
            stderr={path.name: path.read_text() for path in self._folder.glob("*.stderr")},
            failures=self._failures,
            exchanges=self._exchanges.all,
            lags=self._lags,
            links=self._link_of,
        )

    # -- processes -------------------------------------------------------------------------------------------

    @property
    def is_calm(self) -> bool:
        """Whether the disasters are over."""
        return self._calm.is_set()

    def pause(self, seconds: float) -> None:
        """Wait for `seconds`, or until the disasters are over."""
        self._calm.wait(max(0.0, seconds))

    def start(self, role: Role) -> int:
        """Start a process for the role, and return its number.

        A previous process of the role may still run. Disasters then affect only the new one.

        :raises InterruptedRun: `interrupt` was called.
        """
        if self._ending.is_set():
            raise InterruptedRun
        number = next(self._numbers)
        name = f"{role.name.replace('/', '-')}-{number}"
        setup = ProcessSetup(
            number=number,
            endpoint_url=self._links[role.link].endpoint_url,
            log=str(self._file(f"{name}.log")),
            stderr=str(self._file(f"{name}.stderr")),
            calm_file=str(self._file("calm")),
            seed=f"{self._seed} {number}",
        )
        with self._lock:
            self._logs[number] = Path(setup.log)
            self._link_of[role.name] = role.link
        pid = self._forkserver.start(role, setup)
        with self._lock:
            self._pids = {**self._pids, number: pid}
            self._process_of = {**self._process_of, role.name: number}
        return number

    def kill(self, process: int) -> bool:
        """Kill a process. Returns False if it has already ended."""
        at = self._forkserver.kill(process)
        if at is not None:
            self._note(Incident("SIGKILL", at, at, process=process))
        return at is not None

    def has_ended(self, process: int) -> bool:
        """Return whether a process has ended."""
        return self._forkserver.exit_status(process) is not None

    def wait_until_ended(self, process: int, *, within: float) -> int | None:
        """Wait up to `within` seconds for a process. Returns its exit status, or None if it still runs."""
        deadline = time.monotonic() + within
        while (status := self._forkserver.exit_status(process)) is None:
            if time.monotonic() >= deadline or self._ending.is_set():
                return None
            time.sleep(_TICK)
        return status

    def log_of(self, process: int) -> list[log.Event]:
        """Return the events that a process has logged so far."""
        return log.read(self._logs[process])

    # -- disasters -------------------------------------------------------------------------------------------

    def _carry_out(self, disaster: Disaster) -> None:
        """Cause a disaster, wait for its duration, and end it."""
        if disaster.target.startswith(disasters.HOLDER):
            holder = self._choose_holder(disaster)
            if holder is None:
                return
            is_network = disaster.kind in disasters.NETWORK
            disaster = replace(disaster, target=self._link_of[holder] if is_network else holder)
        match disaster.kind:
            case "SIGKILL":
                self._kill_and_replace(disaster)
            case "SIGSTOP":
                self._stop_and_resume(disaster)
            case "engine hangs":
                with self._engine_lock, self._noted(disaster, everywhere=True):
                    self._forkserver.stop_engine(self._engine.process.pid)
                    self.pause(disaster.seconds)
                    self._forkserver.resume_engine(self._engine.process.pid)
            case "engine restarts":
                with self._engine_lock, self._noted(disaster, everywhere=True):
                    if not self._ending.is_set():
                        self._engine.restart()
            case _:
                self._disturb_network(disaster)

    def _choose_holder(self, disaster: Disaster) -> str | None:
        """Choose a role that holds the lock now, or any running process of the group that holds it.

        Returns None if the lock is free, or its holder is the careless process.
        """
        owners = self._records.owners(disaster.target.removeprefix(disasters.HOLDER))
        if not owners:
            return None
        owner = owners[int(disaster.draw * len(owners))]
        if any(role.careless and role.name == owner for role in self._roles):
            return None
        group, _, program = owner.partition("/")
        if program:
            running = [
                name
                for name, process in self._process_of.items()
                if name.startswith(group) and not self.has_ended(process)
            ]
            owner = running[int(disaster.draw * len(running))] if running else owner
        return owner

    def _kill_and_replace(self, disaster: Disaster) -> None:
        # A group starts its own processes, so only roles outside the groups are replaced here.
        role = next((role for role in self._roles if role.name == disaster.target), None)
        process = self._process_of.get(disaster.target)
        if process is not None and self.kill(process) and role is not None:
            self.pause(disaster.seconds)
            self.start(role)

    def _stop_and_resume(self, disaster: Disaster) -> None:
        process = self._process_of.get(disaster.target)
        begin = None if process is None else self._forkserver.stop(process)
        if process is None or begin is None:
            return
        self.pause(disaster.seconds)
        self._forkserver.resume(process)
        self._note(Incident("SIGSTOP", begin, monotonic(), process=process))

    def _disturb_network(self, disaster: Disaster) -> None:
        with ExitStack() as stack, self._noted(disaster, everywhere=not disaster.target):
            for link in [disaster.target] if disaster.target else sorted(self._links):
                stack.enter_context(self._links[link].applying(disasters.rule(disaster)))
            self.pause(disaster.seconds)

    @contextmanager
    def _noted(self, disaster: Disaster, *, everywhere: bool) -> Iterator[None]:
        """Record the block as an incident."""
        incident = Incident(disaster.kind, monotonic(), 0.0, link=disaster.target, everywhere=everywhere)
        try:
            yield
        finally:
            self._note(replace(incident, end=monotonic()))

    def _note(self, incident: Incident) -> None:
        with self._lock:
            self._incidents.append(incident)

    # -- helpers ---------------------------------------------------------------------------------------------

    def _file(self, name: str) -> Path:
        return self._folder / name

    def _in_thread(self, function: Callable[[], None]) -> threading.Thread:
        """Start a thread. An exception in it is a failure of the run, unless the run was interrupted."""

        def run() -> None:
            try:
                function()
            except Exception as failure:
                if not self._ending.is_set():
                    self._failures.append(f"the chaos run itself: {failure!r}")
                    raise

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread
