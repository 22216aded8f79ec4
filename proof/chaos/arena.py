"""One run: an engine, a network of proxies, the processes, and what happens to them. It returns the evidence."""

from __future__ import annotations

import itertools
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Self

from airflow_dynamo_lock import LockError
from airflow_dynamo_lock.client.clock import monotonic
from deployments.clients import lock_client
from deployments.engines import DynamoDBLocal, Engine
from deployments.proxy import Proxy
from proof.chaos import disasters, log
from proof.chaos.actors import Place
from proof.chaos.disasters import Disaster
from proof.chaos.evidence import Evidence, Incident
from proof.chaos.groups import Group
from proof.chaos.nursery import Nursery
from proof.chaos.records import Records
from proof.chaos.settings import CAPACITIES, GROUPS, LEASE, SKEW, Role, cast

_TICK = 0.1
#: How long everybody has for a last turn when nothing goes wrong any more, seconds; on a loaded machine, too.
LAST_TURNS = 90.0


class Interrupted(Exception):
    """The run was ended before its time."""


class Arena:
    """For the length of a ``with`` block, after which nothing of it is left.

    :param careless: one of the cast breaks the rules.
    """

    def __init__(self, engine: type[Engine], seed: str, *, careless: bool = False) -> None:
        self._kind = engine
        self._seed = f"{seed} {engine.name}"
        self._rng = random.Random(self._seed)
        self._cast = cast(self._rng, careless=careless)
        self._calm = threading.Event()
        self._ending = threading.Event()
        self._lock = threading.Lock()
        self._engine_lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._alive: dict[str, int] = {}
        self._link_of: dict[str, str] = {}
        self._logs: dict[int, Path] = {}
        self._incidents: list[Incident] = []
        self._failures: list[str] = []
        self._records = Records()

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="chaos-")))
            keeps_data = self._kind is DynamoDBLocal
            (self._folder / "data").mkdir()
            folder = self._folder / "data" if keeps_data else None
            self._engine = stack.enter_context(self._kind(folder=folder))
            with lock_client("sync", self._engine.endpoint_url) as client:
                client.create_table()
            links = {role.link for role in self._cast}
            links |= {f"{group}/{machine}" for group in GROUPS for machine in ("triggerer", "worker")}
            self._links = {
                link: stack.enter_context(Proxy(self._engine.endpoint_url, self._records.on_answer))
                for link in sorted(links)
            }
            self._nursery = stack.enter_context(Nursery())
            stack.callback(self._end)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def interrupt(self) -> None:
        """Have `play` end now. Whatever is going on in threads comes to an end, and starts nothing new."""
        self._ending.set()
        self._calm.set()

    def _end(self) -> None:
        self.interrupt()
        self._engine_lock.acquire()  # for good: an engine that is being restarted is there to be ended

    # -- the play -----------------------------------------------------------------------------------------------

    def play(self, duration: float) -> Evidence:
        """So many seconds of disasters, and a last turn for everybody after them."""
        began = monotonic()
        groups = self._raise_curtain()
        places = [role.who for role in self._cast if not role.careless]
        places += [
            f"{group}/{does}" for group in GROUPS for does in ("acquire", "keep", "guarded", "guarded")
        ]
        plan = disasters.plan(
            self._rng,
            duration,
            links=sorted(self._links),
            places=places,
            restarts=self._kind is DynamoDBLocal,
        )
        running = []
        for disaster in plan:
            self.pause(began + disaster.at - monotonic())
            if self.calm:
                break  # interrupted
            running.append(self._in_thread(lambda disaster=disaster: self._carry_out(disaster)))  # type: ignore[misc]
        self.pause(began + duration - monotonic())
        self._calm.set()
        for thread in running:
            thread.join()
        calm = monotonic()
        self._file("calm").touch()
        self._until_all_have_had_their_turn(groups)
        ended = monotonic()
        if self._ending.is_set():
            raise Interrupted
        self._check_that_all_is_free()
        self._check_how_they_ended()
        return self._evidence(began, calm, ended)

    def _raise_curtain(self) -> list[threading.Thread]:
        for role in self._cast:
            self.start(role)
        return [
            self._in_thread(Group(self, name, random.Random(f"{self._seed} {name}")).run) for name in GROUPS
        ]

    def _until_all_have_had_their_turn(self, groups: list[threading.Thread]) -> None:
        deadline = time.monotonic() + LAST_TURNS
        late = []
        for role in self._cast:
            if self.until_ended(self._alive[role.who], within=max(0.0, deadline - time.monotonic())) is None:
                late.append(role.who)
        for thread, name in zip(groups, GROUPS, strict=True):
            thread.join(max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                late.append(name)
        self._failures += [f"{name} had no turn within {LAST_TURNS:g} s of calm" for name in late]

    def _check_that_all_is_free(self) -> None:
        """Somebody new can take each lock with all of its slots: none was lost, and no record is left damaged."""
        with lock_client("sync", self._engine.endpoint_url) as client:
            for key, capacity in CAPACITIES.items():
                try:
                    lease = client.acquire(key, slots=capacity, capacity=capacity, timeout=LEASE + SKEW + 10)
                    client.release(lease)
                except LockError as failure:
                    self._failures.append(f"at the end, {key!r} cannot be taken: {failure}")

    def _check_how_they_ended(self) -> None:
        killed = {incident.process for incident in self._incidents if incident.kind == "SIGKILL"}
        for process, path in self._logs.items():
            status = self._nursery.status(process)
            if process not in killed and status is not None and status < 0:
                self._failures.append(f"{path.stem} was ended by a signal that nobody sent, {-status}")

    def _evidence(self, began: float, calm: float, ended: float) -> Evidence:
        events = [event for path in self._logs.values() for event in log.read(path)]
        complaints = {path.name: path.read_text() for path in self._folder.glob("*.complaints")}
        return Evidence(
            engine=self._kind.name,
            began=began,
            calm=calm,
            ended=ended,
            dated=self._kind is not DynamoDBLocal,
            events=sorted(events, key=lambda event: event.at),
            incidents=sorted(self._incidents, key=lambda incident: incident.begin),
            histories=self._records.histories(),
            complaints=complaints,
            failures=self._failures,
            links=self._link_of,
        )

    # -- what the groups use ------------------------------------------------------------------------------------

    @property
    def calm(self) -> bool:
        """Nothing goes wrong any more."""
        return self._calm.is_set()

    def pause(self, seconds: float) -> None:
        """Wait so long, or until nothing goes wrong any more."""
        self._calm.wait(max(0.0, seconds))

    def start(self, role: Role) -> int:
        """A process for that role. Whoever had its place before may still be there, but is not disturbed any more."""
        if self._ending.is_set():
            raise Interrupted
        number = next(self._numbers)
        name = f"{role.who.replace('/', '-')}-{number}"
        place = Place(
            number=number,
            endpoint_url=self._links[role.link].endpoint_url,
            log=str(self._file(f"{name}.log")),
            complaints=str(self._file(f"{name}.complaints")),
            calm=str(self._file("calm")),
            seed=f"{self._seed} {number}",
        )
        with self._lock:
            self._logs[number] = Path(place.log)
            self._link_of[role.who] = role.link
        self._nursery.start(role, place)
        with self._lock:
            self._alive = {**self._alive, role.who: number}
        return number

    def kill(self, process: int) -> bool:
        """Kill it; False if it has ended before."""
        at = self._nursery.kill(process)
        if at is not None:
            self._note(Incident("SIGKILL", at, at, process=process))
        return at is not None

    def ended(self, process: int) -> bool:
        """Whether it has."""
        return self._nursery.status(process) is not None

    def until_ended(self, process: int, *, within: float) -> int | None:
        """Wait for its end; its exit code."""
        deadline = time.monotonic() + within
        while (status := self._nursery.status(process)) is None:
            if time.monotonic() >= deadline or self._ending.is_set():
                return None
            time.sleep(_TICK)
        return status

    def log_of(self, process: int) -> list[log.Event]:
        """What it has written so far."""
        return log.read(self._logs[process])

    # -- disasters ----------------------------------------------------------------------------------------------

    def _carry_out(self, disaster: Disaster) -> None:
        if disaster.target.startswith(disasters.HOLDER):
            holder = self._holder(disaster)
            if holder is None:
                return
            network = disaster.kind in disasters.NETWORK
            disaster = replace(disaster, target=self._link_of[holder] if network else holder)
        match disaster.kind:
            case "SIGKILL":
                self._kill_and_replace(disaster)
            case "SIGSTOP":
                self._stop_for_a_while(disaster)
            case "engine hangs":
                with self._engine_lock, self._noted(disaster, everywhere=True):
                    self._nursery.hang(self._engine.process.pid)
                    self.pause(disaster.lasts)
                    self._nursery.wake(self._engine.process.pid)
            case "engine restarts":
                with self._engine_lock, self._noted(disaster, everywhere=True):
                    if not self._ending.is_set():
                        self._engine.restart()
            case _:
                self._spoil(disaster)

    def _holder(self, disaster: Disaster) -> str | None:
        """The process that it is meant for: one that holds a lock, or works for a group that does."""
        owners = self._records.owners(disaster.target.removeprefix(disasters.HOLDER))
        if not owners:
            return None
        owner = owners[int(disaster.draw * len(owners))]
        if any(role.careless and role.who == owner for role in self._cast):
            return None
        group, _, process = owner.partition("/")
        if process:
            present = [
                who for who in self._alive if who.startswith(group) and not self.ended(self._alive[who])
            ]
            owner = present[int(disaster.draw * len(present))] if present else owner
        return owner

    def _kill_and_replace(self, disaster: Disaster) -> None:
        role = next((role for role in self._cast if role.who == disaster.target), None)
        process = self._alive.get(disaster.target)
        if process is not None and self.kill(process) and role is not None:
            self.pause(disaster.lasts)
            self.start(role)

    def _stop_for_a_while(self, disaster: Disaster) -> None:
        process = self._alive.get(disaster.target)
        begin = None if process is None else self._nursery.stop(process)
        if process is None or begin is None:
            return
        self.pause(disaster.lasts)
        self._nursery.resume(process)
        self._note(Incident("SIGSTOP", begin, monotonic(), process=process))

    def _spoil(self, disaster: Disaster) -> None:
        with ExitStack() as stack, self._noted(disaster, everywhere=not disaster.target):
            for link in [disaster.target] if disaster.target else sorted(self._links):
                stack.enter_context(self._links[link].applying(disasters.rule(disaster)))
            self.pause(disaster.lasts)

    @contextmanager
    def _noted(self, disaster: Disaster, *, everywhere: bool) -> Iterator[None]:
        incident = Incident(disaster.kind, monotonic(), 0.0, link=disaster.target, everywhere=everywhere)
        try:
            yield
        finally:
            self._note(replace(incident, end=monotonic()))

    def _note(self, incident: Incident) -> None:
        with self._lock:
            self._incidents.append(incident)

    # -- parts --------------------------------------------------------------------------------------------------

    def _file(self, name: str) -> Path:
        return self._folder / name

    def _in_thread(self, what: Callable[[], None]) -> threading.Thread:
        def run() -> None:
            try:
                what()
            except Exception as failure:
                if not self._ending.is_set():
                    self._failures.append(f"the tests themselves: {failure!r}")
                    raise

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread
