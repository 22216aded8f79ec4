"""Start two Airflow deployments, let their runs compete for one lock, and report what happened."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import boto3
from rich.console import Console
from rich.live import Live

from airflow_dynamo_lock import LockClient
from airflow_dynamo_lock.airflow.versions import STARTS_IN_TRIGGERER
from airflow_dynamo_lock.embedded import EmbeddedDynamoDB
from demo import ledger
from demo.outcome import Outcome, outcome
from demo.picture import write_page
from demo.screen import Board, failures, report
from deployments import processes
from deployments.airflow_client import FINISHED, AirflowError
from deployments.deployment import Deployment, running

DAG, FIRST_TASK = "warehouse", "first_task"
DAGS = Path(__file__).parent / "dags"
NAMES = ("north", "south")
WORKER_SLOTS = 2  # per deployment: fewer than its waiting runs, to show that waiting occupies no worker
TABLE = "airflow_locks"
REGION = "us-east-1"
CREDENTIALS = "not-a-secret"  # the embedded DynamoDB accepts any credentials
# The demo times out after the first, and on average the second for each turn. On a busy machine, Airflow may take a
# minute to start one task.
SECONDS_TO_START, SECONDS_PER_TURN = 480.0, 60.0
#: With --keep, each deployment starts a run this often.
SECONDS_BETWEEN_KEPT_RUNS = 15.0
POLL = 1.0  # seconds between two requests for the state of the runs


def main() -> int:
    """Run the demo with the options of the command line. Returns 0 if every check has passed, else 1."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument(
        "--runs", type=int, default=5, help="number of runs per deployment (default: %(default)s)"
    )
    parser.add_argument("--keep", action="store_true", help="keep both web interfaces up until Ctrl-C")
    parser.add_argument(
        "--output", type=Path, default="demo-report", help="folder for the report (default: %(default)s)"
    )
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error("--runs must be at least 1")
    try:
        return 0 if demo(Console(highlight=False), arguments.runs, arguments.output, arguments.keep) else 1
    except (AirflowError, TimeoutError) as error:
        print(error, file=sys.stderr)
        return 1


def demo(console: Console, runs: int, output: Path, keep: bool) -> bool:
    """Let `runs` runs of each deployment compete for the lock, and return whether every check has passed.

    The report is printed on the console and written to the folder `output`.
    """
    console.print("Two Airflow deployments, north and south, take turns on one lock in an embedded DynamoDB.")
    with processes.temporary_folder("airflow-dynamo-lock-demo-") as folder, EmbeddedDynamoDB() as dynamodb:
        _create_lock_table(dynamodb.endpoint_url)
        ledger_file = folder / "ledger.jsonl"
        deployments = [_deployment(name, folder / name, dynamodb.endpoint_url, ledger_file) for name in NAMES]
        board = Board(deployments)
        with ExitStack() as stack:
            with Live(board, console=console, refresh_per_second=4, transient=True):
                stack.enter_context(running(*deployments))
                for deployment in deployments:
                    deployment.wait_for_dags({DAG, FIRST_TASK})
                first_runs = [deployment.trigger(FIRST_TASK) for deployment in deployments]
                for deployment, run in zip(deployments, first_runs, strict=True):
                    deployment.wait(FIRST_TASK, run)
                console.print(f"{board.elapsed} both deployments are up, and have run their first task")
                for _ in range(runs):
                    for deployment in deployments:
                        deployment.trigger(DAG)
                console.print(f"{board.elapsed} runs triggered: {runs} per deployment")
                timeout = SECONDS_TO_START + SECONDS_PER_TURN * runs * len(deployments)
                done = _watch(deployments, ledger_file, board, timeout)
                ended = sum(run.state in FINISHED for run in done.runs)
                console.print(f"{board.elapsed} {ended} of {len(done.runs)} runs have ended")
            console.print(failures(deployments, DAG), end="")
            console.print(report(done, console.width))
            console.print(f"The picture: {_write(done, ledger_file, output)}", soft_wrap=True)
            if keep:
                _keep(console, deployments)
            console.print("Stopping everything …")
    return done.passed


def _write(done: Outcome, ledger_file: Path, output: Path) -> Path:
    """Write the picture and a copy of the ledger to the folder `output`. Returns the path of the picture."""
    output.mkdir(parents=True, exist_ok=True)
    if ledger_file.exists():
        shutil.copy(ledger_file, output)
    return write_page(done, output / "index.html").absolute()


def _watch(deployments: Sequence[Deployment], ledger_file: Path, board: Board, timeout: float) -> Outcome:
    """Show the progress until all runs have ended, or for `timeout` seconds, and return the outcome.

    After a timeout the outcome contains unfinished runs, so its verdict fails.
    """
    deadline = time.monotonic() + timeout
    while True:
        runs = {each.name: each.runs(DAG) for each in deployments}
        tasks = {each.name: each.task_instances(DAG) for each in deployments}
        task_processes = [process for each in deployments for process in each.ended_processes()]
        now = outcome(
            ledger.read(ledger_file),
            runs,
            tasks,
            needs_worker=not STARTS_IN_TRIGGERER,
            processes=task_processes,
        )
        board.show(now)
        ended = all(run.state in FINISHED for run in now.runs)
        # The report needs the duration of each process, which Airflow logs up to five seconds after its end.
        logged = STARTS_IN_TRIGGERER or {ti.id for ti in now.lock_tasks} <= {ti for ti, _ in task_processes}
        if (ended and logged) or time.monotonic() > deadline:
            return now
        time.sleep(POLL)


def _keep(console: Console, deployments: Sequence[Deployment]) -> None:
    """Print addresses and logins of the web interfaces, and trigger runs until Ctrl-C, which ends the demo normally."""
    for deployment in deployments:
        login = f"user {deployment.username}, password {deployment.password}"
        console.print(f"{deployment.name}: {deployment.url}/dags/{DAG} ({login})", soft_wrap=True)
        console.print(f"{deployment.name}: {deployment.url}/plugin/locks, the Locks page", soft_wrap=True)
    console.print("Both deployments take turns until Ctrl-C.")
    with suppress(KeyboardInterrupt):
        while True:
            for deployment in deployments:
                deployment.trigger(DAG)
            time.sleep(SECONDS_BETWEEN_KEPT_RUNS)


def _create_lock_table(endpoint_url: str) -> None:
    dynamodb = boto3.client(
        "dynamodb",
        region_name=REGION,
        endpoint_url=endpoint_url,
        aws_access_key_id=CREDENTIALS,
        aws_secret_access_key=CREDENTIALS,
    )
    LockClient(dynamodb, table=TABLE).create_table()


def _deployment(name: str, home: Path, endpoint_url: str, ledger_file: Path) -> Deployment:
    """Create a deployment that uses the lock table. Its tasks write to the ledger.

    The first one has a connection. The other one has its settings in the configuration instead.
    """
    lock = {
        "table": TABLE,
        "aws_conn_id": "aws_default",
        "region_name": REGION,
        "deployment": name,
    }
    if name == NAMES[0]:
        settings = {
            "AIRFLOW_CONN_DYNAMO_LOCK_DEFAULT": json.dumps({"conn_type": "dynamo_lock", "extra": lock})
        }
    else:
        settings = {f"AIRFLOW__DYNAMO_LOCK__{field.upper()}": value for field, value in lock.items()}
    environment = {
        # Set outside the connection, so that the connection is the same as for a table in AWS.
        "AWS_ENDPOINT_URL_DYNAMODB": endpoint_url,
        "AIRFLOW_CONN_AWS_DEFAULT": json.dumps(
            {"conn_type": "aws", "login": CREDENTIALS, "password": CREDENTIALS}
        ),
        **settings,
        "DEMO_DEPLOYMENT": name,
        "DEMO_LEDGER": str(ledger_file),
    }
    return Deployment(name, home, DAGS, env=environment, parallelism=WORKER_SLOTS)
