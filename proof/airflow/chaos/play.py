"""Let runs contend and troubles happen for a while; then let everything settle, and look at what came of it."""

from __future__ import annotations

import argparse
import json
import logging
import random
import sqlite3
import time
from collections import Counter
from contextlib import suppress
from dataclasses import asdict
from datetime import datetime
from importlib.metadata import version
from pathlib import Path

import httpx
import psutil

from airflow_dynamo_lock import LockError, LockRecord
from deployments.airflow_client import AirflowError, Run
from deployments.deployment import Deployment
from deployments.processes import temporary_folder
from proof.airflow.chaos.account import Account, hand_overs, unfinished
from proof.airflow.chaos.scene import NotNow, Scene, Started
from proof.airflow.chaos.troubles import TROUBLES
from proof.airflow.room import LEASE, POLL, Room, opened
from proof.airflow.stays import Fault, Stay, faults

NAMES = ("north", "south")
KEYS = tuple(f"chaos/{name}" for name in ("orders", "customers", "stock"))
WAITERS = 4  # runs for each key that have not ended, about
TROUBLE_EVERY = (2.0, 9.0)  # seconds
LOOK_EVERY = 4.0
SETTLE = 600.0  # seconds that all runs together are given once the trouble is over: more would be for ever
CLEARED = 120.0  # seconds that Airflow is given to forget the triggers of runs that have ended
TAIL = 12  # lines
LONG = 60.0  # seconds: a hand-over that took longer is told in detail

#: What a run is to be, how often, its conf, and how it ends if nobody troubles it.
PARTS: list[tuple[int, str, dict[str, object], str]] = [
    (6, "guarded", {}, "ends by itself"),
    (2, "guarded", {"fails": True}, "fails"),
    (5, "steps", {}, "ends by itself"),
    (1, "steps", {"fails": True}, "fails"),
    (4, "operator", {}, "ends by itself"),
    (2, "skipping", {"timeout": 20}, "ends by itself"),
    (2, "hurried", {"seconds": 100}, "times out with its run"),
]
#: What Airflow would need five minutes for otherwise.
QUICKER = {
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "30",
    "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "30",
}


def main() -> int:
    """As the command line says. Returns 0 if nothing was that must not be."""
    parser = argparse.ArgumentParser(
        prog="python -m proof.airflow.chaos", description="Real Airflow in trouble."
    )
    parser.add_argument("--minutes", type=float, default=10, help="how long trouble goes on (%(default)g)")
    parser.add_argument(
        "--seed", type=int, default=None, help="chooses the troubles, not their timing; random unless given"
    )
    parser.add_argument(
        "--deployments", type=int, choices=(1, 2), default=1, help="that share the lock table (%(default)s)"
    )
    parser.add_argument("--report", type=Path, help="a file for the figures, as JSON")
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"--seed {seed}", flush=True)
    logging.getLogger("airflow_dynamo_lock").setLevel(logging.ERROR)  # what is done is told anyway
    account = Account(seed, options.minutes, options.deployments, len(KEYS), version("apache-airflow"))
    with (
        temporary_folder("airflow-dynamo-lock-chaos-") as folder,
        opened(folder, *NAMES[: options.deployments], env=QUICKER) as room,
    ):
        Play(room, account).go()
    print(account.longest(), account.table(), sep="\n", flush=True)
    if options.report:
        account.write(options.report)
    return 1 if account.violations else 0


class Play:
    """One play, from the first run to the verdict."""

    def __init__(self, room: Room, account: Account) -> None:
        self.room = room
        self.account = account
        self.scene = Scene(room, random.Random(account.seed))
        self._seen: set[object] = set()

    def go(self) -> None:
        """All of it."""
        self._trouble()
        over = time.time()
        found = self._settle()
        self._look_for_faults()
        scene, account = self.scene, self.account
        account.settled = max((run.end.timestamp() - over for _, run in found if run.end), default=0.0)
        account.runs = Counter(run.state for _, run in found)
        self._look_for_the_unfinished(found)
        self._look_for_triggers()
        self._look_at_locks()
        stays = self.room.ledger.stays()
        account.stays, account.leases = len(stays), len({stay.lease_id for stay in stays})
        account.troubles = Counter(trouble.kind for trouble in scene.troubles)
        account.hand_overs = hand_overs(stays, scene.runs, scene.troubles, scene.excuses)
        self._tell_of_long_hand_overs()
        account.overtime = max((self._overtime(stay) for stay in stays), default=0.0)

    # -- what happens -------------------------------------------------------------------------------------------

    def _trouble(self) -> None:
        scene, dice = self.scene, self.scene.dice
        scene.say(f"{len(self.room.deployments)} deployment(s) up; the trouble begins")
        end = time.monotonic() + 60 * self.account.minutes
        next_look = time.monotonic()
        next_trouble = next_look + 15  # for the first runs to be inside
        while time.monotonic() < end:
            scene.do_what_is_due()
            if time.monotonic() >= next_look:
                with suppress(AirflowError, httpx.HTTPError):
                    scene.look()
                    self._start_runs()
                self._look_for_faults()
                next_look = time.monotonic() + LOOK_EVERY
            if time.monotonic() >= next_trouble:
                self._cause_trouble()
                next_trouble = time.monotonic() + dice.uniform(*TROUBLE_EVERY)
            time.sleep(0.1)

    def _start_runs(self) -> None:
        """Keep up how many want each lock."""
        dice = self.scene.dice
        for key in KEYS:
            for _ in range(WAITERS - sum(run.key == key for run in self.scene.live)):
                deployment = dice.choice(self.room.deployments)
                ((_, dag_id, conf, ending),) = dice.choices(PARTS, [part[0] for part in PARTS])
                conf = {"key": key, "seconds": round(dice.uniform(2, 9), 1), **conf}
                run_id = deployment.trigger(dag_id, conf)
                run = Started(deployment, dag_id, run_id, key, ending)
                self.scene.runs[deployment.name, dag_id, run_id] = run

    def _cause_trouble(self) -> None:
        scene = self.scene
        for _ in range(5):
            ((_, cause),) = scene.dice.choices(TROUBLES, [weight for weight, _ in TROUBLES])
            try:
                cause(scene)
            except (NotNow, psutil.NoSuchProcess):
                continue
            except (AirflowError, httpx.HTTPError, LockError) as failure:
                scene.say(f"not done: {cause.__name__}: {str(failure).splitlines()[0][:150]}")
            return

    def _settle(self) -> list[tuple[Deployment, Run]]:
        """Mend everything, and wait until all runs have ended."""
        scene = self.scene
        scene.say("the trouble is over")
        scene.do_what_is_due(all_of_it=True)
        next_line = time.monotonic()
        deadline = next_line + SETTLE
        found: list[tuple[Deployment, Run]] = []
        while time.monotonic() < deadline:
            with suppress(AirflowError, httpx.HTTPError):
                found = scene.look()
                if not scene.live:
                    break
                if time.monotonic() >= next_line:
                    scene.say(f"  {len(scene.live)} runs have not ended yet")
                    next_line = time.monotonic() + 30
            self._look_for_faults()
            time.sleep(LOOK_EVERY)
        return found

    # -- what must not be ---------------------------------------------------------------------------------------

    def _look_for_faults(self) -> None:
        for key in KEYS:
            for fault in faults(self.room.stays(key), self.scene.excuses):
                name = (fault.what.split()[0], *((stay.pid, stay.lease_id) for stay in fault.stays))
                if name not in self._seen:
                    self._seen.add(name)
                    self._violation(str(fault), self._evidence(fault))

    def _look_for_the_unfinished(self, found: list[tuple[Deployment, Run]]) -> None:
        states = {f"{deployment.name}/{run.dag_id}/{run.run_id}": run.state for deployment, run in found}
        for name in unfinished(states):
            run = next(run for run in self.scene.runs.values() if str(run) == name)
            self._violation(f"{name} ({run.key}) is {states[name]} for ever", self._logs(run))

    def _look_for_triggers(self) -> None:
        """No keeper may live on after its run, nor any other trigger."""
        if self.scene.live:
            return  # theirs may
        for deployment in self.room.deployments:
            deadline = time.monotonic() + CLEARED
            while (left := _triggers(deployment)) and time.monotonic() < deadline:
                time.sleep(1)
            if left:
                self._violation(
                    f"{deployment.name}: triggers live on after all runs have ended: {', '.join(left)}"
                )

    def _look_at_locks(self) -> None:
        """Each must be free, if only because its holder is dead; it must not have forgotten its token; and nobody may
        want it any more."""
        locks = self.room.locks
        for key in KEYS:
            tokens = [stay.token for stay in self.room.stays(key)]
            try:
                # What Airflow may leave behind is the lease of a run that was timed out.
                lease = locks.acquire(key, timeout=LEASE + 15)
                locks.release(lease)
            except LockError as failure:
                self._violation(f"{key} cannot be taken when all is over: {failure}")
                continue
            if lease.token <= max(tokens, default=0):
                self._violation(f"{key}: the token {lease.token} is not larger than {max(tokens)}")
        time.sleep(4 * POLL)
        for key in KEYS:
            record = locks.get(key)
            if record is None or record.holders or record.available != record.capacity:
                self._violation(f"{key} does not stay free when all is over", _readable(record))

    def _overtime(self, stay: Stay) -> float:
        since = max(stay.believed, stay.first, self.scene.excuses.resumed_at(stay) or 0.0)
        return stay.last - since

    def _violation(self, what: str, evidence: str = "") -> None:
        self.account.violations.append(what)
        self.scene.say(f"VIOLATION: {what}\n{evidence}")

    def _evidence(self, fault: Fault) -> str:
        parts = []
        for stay in fault.stays:
            lines = self.room.ledger.lines(stay)
            middle = ["…"] if len(lines) > 2 * TAIL else []
            parts += [f"--- what pid {stay.pid} wrote", *lines[:TAIL], *middle, *lines[TAIL:][-TAIL:]]
        first, last = min(stay.first for stay in fault.stays), max(stay.last for stay in fault.stays)
        key = fault.stays[0].key
        parts += [
            "--- what the tasks' logs say of the lock",
            *self._history(key, first - LEASE, last + LEASE),
        ]
        with suppress(LockError):
            parts += ["--- the record", _readable(self.room.locks.get(key))]
        for stay in fault.stays:
            if run := self.scene.run_of(stay):
                parts.append(self._logs(run))
        return "\n".join(parts)

    def _tell_of_long_hand_overs(self) -> None:
        """What all tasks' logs say of the lock meanwhile, for whoever wonders why it took so long."""
        for each in sorted(self.account.hand_overs, key=lambda each: -each.seconds)[:3]:
            if each.seconds > LONG:
                self.scene.say(f"a long hand-over: {each}")
                print(*self._history(each.former.key, each.left - 5, each.next.first), sep="\n", flush=True)

    def _history(self, key: str, since: float, until: float) -> list[str]:
        """What the tasks' logs say of a lock, in order."""
        said = []
        for deployment in self.room.deployments:
            for log in (deployment.home / "logs").rglob("*.log*"):
                for line in log.read_text(errors="replace").splitlines():
                    with suppress(ValueError, KeyError, TypeError):
                        message = json.loads(line)
                        at = datetime.fromisoformat(message["timestamp"])
                        if repr(key) in message["event"] and since <= at.timestamp() <= until:
                            said.append(f"{at:%H:%M:%S.%f} {log.parts[-2]} {message['event'][:300]}")
        return sorted(said)

    def _logs(self, run: Started) -> str:
        """The states of its tasks and the ends of their logs."""
        parts = []
        with suppress(AirflowError, httpx.HTTPError):
            for ti in run.deployment.task_instances(run.dag_id, run.run_id):
                parts.append(
                    f"--- {run} {ti.task_id}: {ti.state}, try {ti.try_number}, pid {ti.pid}, id {ti.id}"
                )
                with suppress(AirflowError, httpx.HTTPError):
                    log = run.deployment.task_log(run.dag_id, run.run_id, ti.task_id)
                    parts += log.splitlines()[-TAIL:]
        return "\n".join(parts)


def _readable(record: LockRecord | None) -> str:
    return "no record" if record is None else "\n".join(f"{k}: {v}" for k, v in asdict(record).items())


def _triggers(deployment: Deployment) -> list[str]:
    """What the triggerer still has to run."""
    with sqlite3.connect(f"file:{deployment.home / 'airflow.db'}?mode=ro", uri=True) as database:
        rows = database.execute("SELECT classpath FROM trigger").fetchall()
    database.close()
    return [row[0] for row in rows]
