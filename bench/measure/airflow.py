"""What a lock costs in Airflow: two real deployments, with all their processes, share a table on moto.

- *Worker-slot seconds*: how long the tasks that lock, not those that work, occupy worker slots. Each poke of a sensor
  counts.
- *Added seconds*: by how much a lock makes a run longer if no other run contends.
- *Hand-over*: from the end of one run's last work to the start of the next run's first work. It includes the time in
  which Airflow starts tasks. *Airflow's own step*, from the end of a run's first task to the start of its second, is
  measured in the same runs.
- *Time line*: the steps of a run, and of a hand-over, by component (`time_line.py`).
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

from airflow_dynamo_lock import LockClient
from bench.adapters.ours import TABLE, TABLE_WITH_STREAM
from bench.contestants import ENVIRONMENT
from bench.measure import time_line
from bench.measure.spread import percentile, spread
from bench.meter import engine_client
from deployments import processes
from deployments.airflow_client import Run, TaskInstance
from deployments.deployment import Deployment, running
from deployments.engines import MotoServer

DAGS = Path(__file__).parents[1] / "dags"
NAMES = ("north", "south")
ALONE = 6  # runs of each DAG without contention, one after another
CONTENDING = 8  # contending runs of each DAG in each deployment
PACE = 2.0  # seconds between the starts of two contending runs
SLOTS = 4  # worker slots of a deployment
WORKING = {"extract", "load"}
LOCKING = ("locked", "flagged")
STREAMED = "streamed"  # as "locked", but waiters read the stream of the table


@dataclass(frozen=True)
class Stay:
    """The work of a run: from the start of its first working task to the end of its last, in epoch seconds.

    :ivar step: seconds from the end of its first working task to the start of its second.
    """

    deployment: str
    run_id: str
    start: float
    end: float
    step: float


def measure() -> dict[str, Any]:
    """Measure runs of each DAG one at a time, and then runs that contend for the lock."""
    with (
        processes.temporary_folder("airflow-dynamo-lock-bench-") as folder,
        _deployments(folder) as deployments,
    ):
        ledger = folder / "ledger.jsonl"
        for deployment in deployments:  # the first task of a new deployment takes about 10 s
            deployment.wait("plain", deployment.trigger("plain"))
        alone = {dag: _alone(deployments[0], dag, ledger) for dag in ("plain", *LOCKING)}
        contending = {dag: _contending(deployments, dag, ledger) for dag in (*LOCKING, STREAMED)}
        lines = _time_lines(deployments, ledger)
    plain = alone["plain"]["run_seconds"]["median"]
    for dag in LOCKING:
        alone[dag]["added_seconds"] = round(alone[dag]["run_seconds"]["median"] - plain, 2)
    return {"alone": alone, "contending": contending, "slots": SLOTS, "time_line": lines}


@contextmanager
def _deployments(folder: Path) -> Iterator[list[Deployment]]:
    with MotoServer() as engine:
        client = engine_client(engine.endpoint_url)
        LockClient(client, table=TABLE).create_table()
        LockClient(client, table=TABLE_WITH_STREAM).create_table(streams=True)
        client.create_table(
            TableName="flags",
            BillingMode="PAY_PER_REQUEST",
            AttributeDefinitions=[{"AttributeName": "key", "AttributeType": "S"}],
            KeySchema=[{"AttributeName": "key", "KeyType": "HASH"}],
        )
        deployments = [_deployment(name, folder, engine.endpoint_url) for name in NAMES]
        with running(*deployments):
            for deployment in deployments:
                deployment.wait_for_dags({"plain", *LOCKING, STREAMED})
                deployment.add_pool("warehouse", 1)
            yield deployments


def _deployment(name: str, folder: Path, endpoint_url: str) -> Deployment:
    login = {"login": ENVIRONMENT["AWS_ACCESS_KEY_ID"], "password": ENVIRONMENT["AWS_SECRET_ACCESS_KEY"]}
    lock = {
        "table": TABLE,
        "region_name": ENVIRONMENT["AWS_DEFAULT_REGION"],
        "deployment": name,
    }
    streamed = {**lock, "table": TABLE_WITH_STREAM, "streams": True}
    environment = {
        **ENVIRONMENT,
        **time_line.ENVIRONMENT,
        "AWS_ENDPOINT_URL_DYNAMODB": endpoint_url,
        "AWS_ENDPOINT_URL_DYNAMODB_STREAMS": endpoint_url,
        "AIRFLOW_CONN_AWS_DEFAULT": json.dumps({"conn_type": "aws", **login}),
        "AIRFLOW_CONN_DYNAMO_LOCK_DEFAULT": json.dumps({"conn_type": "dynamo_lock", "extra": lock}),
        "AIRFLOW_CONN_DYNAMO_LOCK_STREAMED": json.dumps({"conn_type": "dynamo_lock", "extra": streamed}),
        "BENCH_DEPLOYMENT": name,
        "BENCH_ENDPOINT": endpoint_url,
        "BENCH_LEDGER": str(folder / "ledger.jsonl"),
    }
    return Deployment(name, folder / name, DAGS, env=environment, parallelism=SLOTS)


def _alone(deployment: Deployment, dag: str, ledger: Path) -> dict[str, Any]:
    deployment.wait(dag, deployment.trigger(dag))  # not measured: the first run is slower
    runs = [deployment.wait(dag, deployment.trigger(dag)) for _ in range(ALONE)]
    assert all(run.state == "success" for run in runs)
    return {
        "run_seconds": spread([_run_seconds(run) for run in runs]),
        "slot_seconds": spread([_slot_seconds(deployment, run, ledger) for run in runs]),
        "work_seconds": spread([_work_seconds(deployment, run) for run in runs]),
    }


def _contending(deployments: list[Deployment], dag: str, ledger: Path) -> dict[str, Any]:
    started = []
    for deployment in deployments * CONTENDING:
        started.append((deployment, deployment.trigger(dag)))
        time.sleep(PACE)  # so that the deployments alternate, even if one scheduler is faster
    runs = [(each, each.wait(dag, run_id, timeout=900.0)) for each, run_id in started]
    assert all(run.state == "success" for _, run in runs)
    stays = _stays(ledger, {run.run_id for _, run in runs})
    assert len(stays) == len(runs)
    handovers = [later.start - earlier.end for earlier, later in pairwise(stays)]
    between = [
        later.start - earlier.end
        for earlier, later in pairwise(stays)
        if earlier.deployment != later.deployment
    ]
    return {
        "runs": len(runs),
        "slot_seconds": spread([_slot_seconds(each, run, ledger) for each, run in runs]),
        "between_deployments": _percentiles(between),
        "all_handovers": _percentiles(handovers),
        "airflow_step": _percentiles([stay.step for stay in stays]),
        "overlaps": sum(seconds < 0 for seconds in handovers),
        "sensors_failed_by_airflow": sum(_tries(each, run) - 1 for each, run in runs),
        "all_done_seconds": round(stays[-1].end - stays[0].start, 1),
    }


def _time_lines(deployments: list[Deployment], ledger: Path) -> dict[str, Any]:
    """Return the time lines of all runs under `DynamoLock`: the first deployment's are alone, and then all contend."""
    times: dict[str, list[time_line.RunTimes]] = {}
    for deployment in deployments:
        work = defaultdict(list)
        for entry in _entries(ledger):
            if entry["deployment"] == deployment.name:
                work[entry["run"]].append(entry["at"])
        runs = deployment.runs("locked")
        times[deployment.name] = [time_line.RunTimes.of(deployment, run, work[run.run_id]) for run in runs]
    first, *alone = times[deployments[0].name][: 1 + ALONE]
    contending = {
        run: name
        for name, runs in times.items()
        for run in runs[1 + ALONE if name == deployments[0].name else 0 :]
    }
    turns = sorted(contending, key=lambda run: run.work[0])
    handovers: dict[bool, list[time_line.Steps]] = {True: [], False: []}
    for earlier, later in pairwise(turns):
        within = contending[earlier] == contending[later]
        handovers[within].append(time_line.handed_over(earlier, later))
    return {
        "alone": time_line.table([time_line.uncontended(run) for run in alone]),
        "within": time_line.table(handovers[True]),
        "between": time_line.table(handovers[False]),
        "trigger": time_line.triggers([run.trigger("lock.acquire") for run in (first, *alone)]),
    }


def _percentiles(seconds: list[float]) -> dict[str, Any]:
    if not seconds:
        return {"of": 0}
    return {
        "p50": round(median(seconds), 2),
        "p99": round(percentile(seconds, 0.99), 2),
        "max": round(max(seconds), 2),
        "of": len(seconds),
    }


def _stays(ledger: Path, run_ids: set[str]) -> list[Stay]:
    """Return the work of these runs, in the order in which it began."""
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for entry in _entries(ledger):
        if entry["run"] in run_ids and entry["event"] != "locking":
            times[entry["deployment"], entry["run"]].append(entry["at"])
    stays = []
    for (deployment, run_id), at in times.items():
        start, first_end, second_start, end = sorted(at)
        stays.append(Stay(deployment, run_id, start, end, second_start - first_end))
    return sorted(stays, key=lambda stay: stay.start)


def _run_seconds(run: Run) -> float:
    """Return the seconds from the trigger of the run to its end."""
    assert run.queued_at is not None
    assert run.end is not None
    return (run.end - run.queued_at).total_seconds()


def _slot_seconds(deployment: Deployment, run: Run, ledger: Path) -> float:
    """Return the seconds for which the run's locking tasks occupied worker slots.

    Tasks of the group `lock` without a process id have run in the triggerer only. Tasks of the DAG ``flagged`` record
    their time themselves, in the ledger.
    """
    tasks = deployment.task_instances(run.dag_id, run.run_id)
    in_group = [
        _duration(ti)
        for ti in tasks
        if ti.task_id.startswith("lock.") and ti.pid is not None and not _works(ti)
    ]
    in_ledger: list[float] = [
        entry["on_worker"]
        for entry in _entries(ledger)
        if (entry["deployment"], entry["run"], entry["event"]) == (deployment.name, run.run_id, "locking")
    ]
    return sum(in_group) + sum(in_ledger)


def _work_seconds(deployment: Deployment, run: Run) -> float:
    """Return the seconds for which the run's working tasks occupied worker slots."""
    return sum(_duration(ti) for ti in deployment.task_instances(run.dag_id, run.run_id) if _works(ti))


def _tries(deployment: Deployment, run: Run) -> int:
    """Return the number of tries of the task that acquires the lock or sets the flag."""
    tasks = deployment.task_instances(run.dag_id, run.run_id)
    (tries,) = (ti.try_number for ti in tasks if ti.task_id in ("lock.acquire", "set_flag"))
    return tries


def _works(ti: TaskInstance) -> bool:
    return ti.task_id.rpartition(".")[2] in WORKING


def _duration(ti: TaskInstance) -> float:
    assert ti.start is not None
    assert ti.end is not None
    return (ti.end - ti.start).total_seconds()


def _entries(ledger: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in ledger.read_text().splitlines()]
