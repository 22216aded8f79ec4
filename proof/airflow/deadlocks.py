"""Deadlocks in real Airflow: runs of two deployments nest locks in opposite orders, or in a ring of three.

``python -m proof.airflow.deadlocks --times 50`` plays each kind that many times, and counts what went wrong. In each
round, exactly one run must end, by an error that names all locks and runs of the cycle, and the others must succeed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from statistics import median
from typing import Any

from deployments import processes
from deployments.ctrl_c import leaving_on_ctrl_c
from deployments.deployment import Deployment
from proof.airflow.lease_uses import violations
from proof.airflow.testbed import Testbed, start_testbed
from proof.reports import add_report_option

DAG_ID = "crossed"
#: The deployments of a testbed for these rounds.
NAMES = ("north", "south")
_WAITS = "outer.inner.acquire"
# On a busy machine, a process may not run for some seconds, and must not lose its lease.
_TIMES = {"lease": 120, "grace": 60}


@dataclass
class Round:
    """One round: its runs, and what it showed.

    :ivar runs: deployment, id and outer key of each run.
    """

    keys: list[str]
    runs: list[tuple[Deployment, str, str]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    seconds: float | None = None


def start_round(testbed: Testbed, name: str, number: int) -> Round:
    """Start `number` runs, one after another in the deployments, that each wait for the lock of the next one."""
    keys = [f"{name}/{letter}" for letter in "abcdefgh"[:number]]
    started = Round(keys)
    for index, key in enumerate(keys):
        deployment = testbed.deployments[index % len(testbed.deployments)]
        conf = _TIMES | {
            "key": key,
            "inner": keys[(index + 1) % number],
            "together": name.replace("/", "_"),
            "of": number,
        }
        started.runs.append((deployment, deployment.trigger(DAG_ID, conf), key))
    return started


def finish_round(testbed: Testbed, started: Round) -> None:
    """Wait until all runs of the round have ended, and judge them."""
    states = [deployment.wait(DAG_ID, run_id).state for deployment, run_id, _ in started.runs]
    if sorted(states) != ["failed", *["success"] * (len(states) - 1)]:
        started.violations.append(f"the runs of {started.keys} ended as {states}")
    homes = [(deployment.home, run_id) for deployment, run_id, _ in started.runs]
    started.seconds = cycle_lasted(homes)
    for (deployment, run_id, _), state in zip(started.runs, states, strict=True):
        if state != "failed":
            continue
        failed = [
            each.task_id for each in deployment.task_instances(DAG_ID, run_id) if each.state == "failed"
        ]
        log = "\n".join(deployment.task_log(DAG_ID, run_id, each) for each in failed)
        if failed != [_WAITS]:
            started.violations.append(f"{failed} of {run_id} have failed: {log[-4000:]}")
            continue
        for owner, _, key in started.runs:
            following = started.keys[(started.keys.index(key) + 1) % len(started.keys)]
            if f"holds {key!r} and waits for {following!r}" not in log or owner.name not in log:
                started.violations.append(
                    f"the error of {run_id} does not name {key!r} and {following!r}: {log}"
                )
    for key in started.keys:
        uses = testbed.uses(key)
        started.violations += [str(each) for each in violations(uses)]
        record = testbed.locks.get(key)
        if record is None or record.holders:
            started.violations.append(f"{key} is not free after all runs of its round have ended")


def cycle_lasted(runs: Iterable[tuple[Path, str]]) -> float | None:
    """Seconds from when the last of the runs began to wait until one of them logged the error; None if none did.

    :param runs: home of the deployment and id of each run.
    """
    waits, errors = list[datetime](), list[datetime]()
    for home, run_id in runs:
        folder = home / "logs" / f"dag_id={DAG_ID}" / f"run_id={run_id}" / f"task_id={_WAITS}"
        lines = [json.loads(line) for log in folder.glob("*.log*") for line in log.read_text().splitlines()]
        times = [(datetime.fromisoformat(line["timestamp"]), line["event"]) for line in lines]
        waits += sorted(at for at, event in times if event.startswith("Waiting for the lock"))[:1]
        errors += [at for at, event in times if "would never end" in event]
    return (min(errors) - max(waits)).total_seconds() if errors and waits else None


def measure(testbed: Testbed, times: int, batch: int) -> dict[str, Any]:
    """Play `times` rounds of two runs, and as many of three, `batch` at a time. Returns the report."""
    report: dict[str, Any] = {"times": times}
    for number in (2, 3):
        rounds: list[Round] = []
        for first in range(0, times, batch):
            some = [
                start_round(testbed, f"{number}/{each}", number)
                for each in range(first, min(first + batch, times))
            ]
            for each in some:
                finish_round(testbed, each)
                print(f"{each.keys}: {each.seconds} s {each.violations}", flush=True)
            rounds += some
        seconds = sorted(each.seconds for each in rounds if each.seconds is not None)
        report[str(number)] = {
            "errors": len(seconds),
            "median_seconds": round(median(seconds), 1) if seconds else None,
            "longest_seconds": round(max(seconds), 1) if seconds else None,
            "violations": [each for one in rounds for each in one.violations],
        }
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit status: 0 if nothing went wrong, else 1."""
    parser = argparse.ArgumentParser(prog="python -m proof.airflow.deadlocks", description=__doc__)
    parser.add_argument("--times", type=int, default=50, help="rounds of each kind (default: 50)")
    parser.add_argument("--batch", type=int, default=2, help="rounds at the same time (default: 2)")
    add_report_option(parser)
    options = parser.parse_args(arguments)
    begun = time.monotonic()
    with (
        processes.temporary_folder("airflow-dynamo-lock-deadlocks-") as folder,
        start_testbed(folder, *NAMES) as testbed,
    ):
        report = measure(testbed, options.times, options.batch)
    report["wall-clock seconds"] = round(time.monotonic() - begun)
    if options.report is not None:
        options.report.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))
    return 1 if any(report[kind]["violations"] for kind in ("2", "3")) else 0


if __name__ == "__main__":
    with leaving_on_ctrl_c():
        sys.exit(main())
