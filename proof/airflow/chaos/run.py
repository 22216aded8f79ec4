"""Causes troubles for some minutes, waits until all DAG runs have ended, and checks for violations."""

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

import httpx
import psutil

from airflow_dynamo_lock import LockError, LockRecord
from deployments.airflow_client import AirflowError, Run
from deployments.deployment import Deployment
from deployments.processes import temporary_folder
from proof.airflow.chaos.report import Report, hand_overs, unfinished
from proof.airflow.chaos.state import ChaosState, NoTarget, StartedRun
from proof.airflow.chaos.troubles import TROUBLES
from proof.airflow.lease_uses import Violation, overtime, violations
from proof.airflow.testbed import LEASE, POLL, Testbed, start_testbed
from proof.reports import add_report_option

NAMES = ("north", "south")
KEYS = tuple(f"chaos/{name}" for name in ("orders", "customers", "stock"))
RUNS_PER_KEY = 4  # number of unfinished DAG runs per key, approximately
TROUBLE_INTERVAL = (2.0, 9.0)  # shortest and longest, in seconds
CHECK_INTERVAL = 4.0  # seconds between two checks of the DAG runs and the ledger
SETTLE = 600.0  # seconds that all DAG runs together have to end after the troubles
TRIGGERS_REMOVED = 120.0  # seconds within which Airflow must remove the triggers of ended runs
TAIL = 12  # number of lines that are printed of a log
LONG = 60.0  # hand-overs that take longer are printed in detail, in seconds

#: The kinds of DAG runs: weight, DAG id, conf, and how they end if no trouble affects them.
RUN_KINDS: list[tuple[int, str, dict[str, object], str]] = [
    (6, "guarded", {}, "run ends normally"),
    (2, "guarded", {"fails": True}, "task fails"),
    (5, "steps", {}, "run ends normally"),
    (1, "steps", {"fails": True}, "task fails"),
    (4, "operator", {}, "run ends normally"),
    (2, "skipping", {"timeout": 20}, "run ends normally"),
    (2, "hurried", {"seconds": 100}, "run times out"),
]
#: Shorter times than Airflow's defaults of five minutes.
FASTER_RECOVERY = {
    "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "30",
    "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "30",
}


def main() -> int:
    """Run the command line. Returns 1 if there are violations, else 0."""
    parser = argparse.ArgumentParser(prog="python -m proof.airflow.chaos", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=10, help="duration of the troubles (default: %(default)g)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=None,
        help="choose the same troubles as an earlier run; their times differ (default: a random seed)",
    )
    parser.add_argument(
        "--deployments",
        type=int,
        choices=(1, 2),
        default=1,
        help="number of deployments that share the lock table (default: %(default)s)",
    )
    add_report_option(parser)
    options = parser.parse_args()
    seed = random.SystemRandom().randrange(10**6) if options.seed is None else options.seed
    print(f"--seed {seed}", flush=True)
    logging.getLogger("airflow_dynamo_lock").setLevel(logging.ERROR)  # the run prints each trouble itself
    report = Report(seed, options.minutes, options.deployments, len(KEYS), version("apache-airflow"))
    with (
        temporary_folder("airflow-dynamo-lock-chaos-") as folder,
        start_testbed(folder, *NAMES[: options.deployments], env=FASTER_RECOVERY) as testbed,
    ):
        ChaosRun(testbed, report).run()
    print(report.longest_as_text(), report.as_text(), sep="\n", flush=True)
    if options.report:
        report.write(options.report)
    return 1 if report.violations else 0


class ChaosRun:
    """One chaos run on a testbed. `run` fills the report."""

    def __init__(self, testbed: Testbed, report: Report) -> None:
        self.testbed = testbed
        self.report = report
        self.state = ChaosState(testbed, random.Random(report.seed))
        self._reported: set[object] = set()

    def run(self) -> None:
        """Cause troubles, wait until all DAG runs have ended, and check for violations."""
        self._cause_troubles()
        trouble_ended = time.time()
        found = self._settle()
        self._check_ledger()
        state, report = self.state, self.report
        report.settled = max(
            (run.end.timestamp() - trouble_ended for _, run in found if run.end), default=0.0
        )
        report.runs = Counter(run.state for _, run in found)
        self._check_that_runs_have_ended(found)
        self._check_that_triggers_are_removed()
        self._check_that_locks_are_free()
        uses = self.testbed.ledger.uses()
        report.uses, report.leases = len(uses), len({use.lease_id for use in uses})
        report.troubles = Counter(trouble.kind for trouble in state.troubles)
        report.hand_overs = hand_overs(uses, state.runs, state.troubles, state.exemptions)
        self._print_long_hand_overs()
        report.overtime = max((overtime(use, state.exemptions) for use in uses), default=0.0)

    # -- the course of the run -------------------------------------------------------------------------------

    def _cause_troubles(self) -> None:
        """Start DAG runs and cause troubles, for the minutes of the report."""
        state = self.state
        state.say(f"{len(self.testbed.deployments)} deployment(s) started; the troubles begin")
        end = time.monotonic() + 60 * self.report.minutes
        next_check = time.monotonic()
        next_trouble = next_check + 15  # until then, the first runs should be inside
        while time.monotonic() < end:
            state.run_scheduled()
            if time.monotonic() >= next_check:
                with suppress(AirflowError, httpx.HTTPError):
                    state.refresh()
                    self._start_runs()
                self._check_ledger()
                next_check = time.monotonic() + CHECK_INTERVAL
            if time.monotonic() >= next_trouble:
                self._cause_trouble()
                next_trouble = time.monotonic() + state.rng.uniform(*TROUBLE_INTERVAL)
            time.sleep(0.1)

    def _start_runs(self) -> None:
        """Start DAG runs until each key has `RUNS_PER_KEY` unfinished ones."""
        rng = self.state.rng
        for key in KEYS:
            for _ in range(RUNS_PER_KEY - sum(run.key == key for run in self.state.unfinished)):
                deployment = rng.choice(self.testbed.deployments)
                ((_, dag_id, conf, ending),) = rng.choices(RUN_KINDS, [kind[0] for kind in RUN_KINDS])
                conf = {"key": key, "seconds": round(rng.uniform(2, 9), 1), **conf}
                run_id = deployment.trigger(dag_id, conf)
                run = StartedRun(deployment, dag_id, run_id, key, ending)
                self.state.runs[deployment.name, dag_id, run_id] = run

    def _cause_trouble(self) -> None:
        """Cause one trouble. If it finds no target, choose another one, up to five times."""
        state = self.state
        for _ in range(5):
            ((_, cause),) = state.rng.choices(TROUBLES, [weight for weight, _ in TROUBLES])
            try:
                cause(state)
            except (NoTarget, psutil.NoSuchProcess):
                continue
            except (AirflowError, httpx.HTTPError, LockError) as failure:
                state.say(f"{cause.__name__} failed: {str(failure).splitlines()[0][:150]}")
            return

    def _settle(self) -> list[tuple[Deployment, Run]]:
        """Repair everything, and wait until all DAG runs have ended. Returns all DAG runs."""
        state = self.state
        state.say("the troubles are over")
        state.run_scheduled(all_of_them=True)
        next_line = time.monotonic()
        deadline = next_line + SETTLE
        found: list[tuple[Deployment, Run]] = []
        while time.monotonic() < deadline:
            with suppress(AirflowError, httpx.HTTPError):
                found = state.refresh()
                if not state.unfinished:
                    break
                if time.monotonic() >= next_line:
                    state.say(f"  {len(state.unfinished)} runs have not ended yet")
                    next_line = time.monotonic() + 30
            self._check_ledger()
            time.sleep(CHECK_INTERVAL)
        return found

    # -- checks ----------------------------------------------------------------------------------------------

    def _check_ledger(self) -> None:
        """Report violations in the ledger that have not been reported yet."""
        for key in KEYS:
            for violation in violations(self.testbed.uses(key), self.state.exemptions):
                name = (violation.rule, *((use.pid, use.lease_id) for use in violation.uses))
                if name not in self._reported:
                    self._reported.add(name)
                    self._add_violation(str(violation), self._evidence(violation))

    def _check_that_runs_have_ended(self, found: list[tuple[Deployment, Run]]) -> None:
        states = {f"{deployment.name}/{run.dag_id}/{run.run_id}": run.state for deployment, run in found}
        for name in unfinished(states):
            run = next(run for run in self.state.runs.values() if str(run) == name)
            self._add_violation(f"{name} ({run.key}) remains {states[name]}", self._task_logs(run))

    def _check_that_triggers_are_removed(self) -> None:
        """Check that no heartbeat task or other trigger continues after all DAG runs have ended."""
        if self.state.unfinished:
            return  # their triggers may continue
        for deployment in self.testbed.deployments:
            deadline = time.monotonic() + TRIGGERS_REMOVED
            while (left := _triggers(deployment)) and time.monotonic() < deadline:
                time.sleep(1)
            if left:
                names = ", ".join(left)
                self._add_violation(f"{deployment.name}: triggers after all runs have ended: {names}")

    def _check_that_locks_are_free(self) -> None:
        """Check that each lock can be acquired, has kept its last token, and then stays free."""
        locks = self.testbed.locks
        for key in KEYS:
            tokens = [use.token for use in self.testbed.uses(key)]
            try:
                # Airflow does not release the lock of a run that has timed out, so its lease may have to run
                # out.
                lease = locks.acquire(key, timeout=LEASE + 15)
                locks.release(lease)
            except LockError as failure:
                self._add_violation(f"{key} cannot be acquired after all runs have ended: {failure}")
                continue
            if lease.token <= max(tokens, default=0):
                self._add_violation(f"{key}: the token {lease.token} is not larger than {max(tokens)}")
        time.sleep(4 * POLL)
        for key in KEYS:
            record = locks.get(key)
            if record is None or record.holders or record.available != record.capacity:
                self._add_violation(
                    f"{key} does not stay free after all runs have ended", _record_text(record)
                )

    def _add_violation(self, what: str, evidence: str = "") -> None:
        self.report.violations.append(what)
        self.state.say(f"VIOLATION: {what}\n{evidence}")

    # -- details for people ----------------------------------------------------------------------------------

    def _evidence(self, violation: Violation) -> str:
        """Return the ledger's lines, the logs and the record that belong to a violation."""
        parts = []
        for use in violation.uses:
            lines = self.testbed.ledger.lines(use)
            middle = ["…"] if len(lines) > 2 * TAIL else []
            parts += [f"--- lines of pid {use.pid}", *lines[:TAIL], *middle, *lines[TAIL:][-TAIL:]]
        first, last = min(use.first for use in violation.uses), max(use.last for use in violation.uses)
        key = violation.uses[0].key
        parts += ["--- log lines about the lock", *self._log_lines(key, first - LEASE, last + LEASE)]
        with suppress(LockError):
            parts += ["--- the record", _record_text(self.testbed.locks.get(key))]
        for use in violation.uses:
            if run := self.state.run_of(use):
                parts.append(self._task_logs(run))
        return "\n".join(parts)

    def _print_long_hand_overs(self) -> None:
        """Print the log lines of the three longest hand-overs, if they took longer than `LONG`."""
        for each in sorted(self.report.hand_overs, key=lambda each: -each.seconds)[:3]:
            if each.seconds > LONG:
                self.state.say(f"a long hand-over: {each}")
                lines = self._log_lines(each.previous.key, each.begin - 5, each.following.first)
                print(*lines, sep="\n", flush=True)

    def _log_lines(self, key: str, since: float, until: float) -> list[str]:
        """Return the lines about a lock in all task logs, in order. Times are seconds since the epoch."""
        found = []
        for deployment in self.testbed.deployments:
            for log in (deployment.home / "logs").rglob("*.log*"):
                for line in log.read_text(errors="replace").splitlines():
                    with suppress(ValueError, KeyError, TypeError):
                        message = json.loads(line)
                        at = datetime.fromisoformat(message["timestamp"])
                        if repr(key) in message["event"] and since <= at.timestamp() <= until:
                            found.append(f"{at:%H:%M:%S.%f} {log.parts[-2]} {message['event'][:300]}")
        return sorted(found)

    def _task_logs(self, run: StartedRun) -> str:
        """Return the states of a run's tasks, and the ends of their logs."""
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


def _record_text(record: LockRecord | None) -> str:
    return "no record" if record is None else "\n".join(f"{k}: {v}" for k, v in asdict(record).items())


def _triggers(deployment: Deployment) -> list[str]:
    """Return the class paths of the triggers in Airflow's database."""
    with sqlite3.connect(f"file:{deployment.home / 'airflow.db'}?mode=ro", uri=True) as database:
        rows = database.execute("SELECT classpath FROM trigger").fetchall()
    database.close()
    return [row[0] for row in rows]
