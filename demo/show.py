"""The demo itself: bring everything up, let the runs contend, look on, and report."""

from __future__ import annotations

import argparse
import json
import shutil
import signal
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

DAG = "warehouse"
DAGS = Path(__file__).parent / "dags"
NAMES = ("north", "south")
WORKER_SLOTS = 2  # of each deployment: fewer than it has runs waiting
TABLE = "airflow_locks"
REGION = "us-east-1"
CREDENTIALS = "not-a-secret"  # the embedded DynamoDB takes any
PATIENCE = 60.0  # seconds that each turn may take, on average, until the demo gives up
POLL = 1.0


def main() -> int:
    """Run the demo as the command line says. Returns 0 if everything was seen that the lock promises."""
    parser = argparse.ArgumentParser(prog="python -m demo", description=__doc__)
    parser.add_argument("--runs", type=int, default=5, help="runs of each deployment (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="leave both web interfaces up until Ctrl-C")
    parser.add_argument(
        "--output", type=Path, default="demo-report", help="folder for the report (%(default)s)"
    )
    arguments = parser.parse_args()
    if arguments.runs < 1:
        parser.error("--runs must be 1 at least")
    try:
        return 0 if demo(Console(highlight=False), arguments.runs, arguments.output, arguments.keep) else 1
    except (AirflowError, TimeoutError) as error:
        print(error, file=sys.stderr)
        return 1


def demo(console: Console, runs: int, output: Path, keep: bool) -> bool:
    """Let `runs` runs of each deployment contend, and report to `output` as well. Returns the verdict."""
    console.print("Two Airflow deployments, north and south, take turns on one lock in an embedded DynamoDB.")
    with processes.temporary_folder("airflow-dynamo-lock-demo-") as folder, EmbeddedDynamoDB() as dynamodb:
        _create_lock_table(dynamodb.endpoint_url)
        journal = folder / "ledger.jsonl"
        deployments = [_deployment(name, folder / name, dynamodb.endpoint_url, journal) for name in NAMES]
        board = Board(deployments)
        with ExitStack() as stack:
            with Live(board, console=console, refresh_per_second=4, transient=True):
                stack.enter_context(running(*deployments))
                for deployment in deployments:
                    deployment.wait_for_dags({DAG})
                console.print(f"{board.elapsed} both deployments are up")
                for _ in range(runs):
                    for deployment in deployments:
                        deployment.trigger(DAG)
                console.print(f"{board.elapsed} {runs} runs of each want the lock")
                done = _watch(deployments, journal, board, timeout=PATIENCE * (1 + runs * len(deployments)))
                ended = sum(run.state in FINISHED for run in done.runs)
                console.print(f"{board.elapsed} {ended} of {len(done.runs)} runs have ended")
            console.print(failures(deployments, DAG), end="")
            console.print(report(done, console.width))
            console.print(f"The picture: {_write(done, journal, output)}", soft_wrap=True)
            if keep:
                _keep(console, deployments)
            console.print("Stopping everything …")
    return done.holds


def _write(done: Outcome, journal: Path, output: Path) -> Path:
    """Leave the picture and the ledger in the output folder. Returns where the picture is."""
    output.mkdir(parents=True, exist_ok=True)
    if journal.exists():
        shutil.copy(journal, output)
    return write_page(done, output / "index.html").absolute()


def _watch(deployments: Sequence[Deployment], journal: Path, board: Board, timeout: float) -> Outcome:
    """Look on until all runs are done, or until it takes too long; the verdict tells the difference."""
    deadline = time.monotonic() + timeout
    while True:
        runs = {each.name: each.runs(DAG) for each in deployments}
        tasks = {each.name: each.task_instances(DAG) for each in deployments}
        processes = [process for each in deployments for process in each.ended_processes()]
        now = outcome(
            ledger.read(journal), runs, tasks, needs_worker=not STARTS_IN_TRIGGERER, processes=processes
        )
        board.show(now)
        ended = all(run.state in FINISHED for run in now.runs)
        # Airflow notes the end of a process up to five seconds after it.
        noted = STARTS_IN_TRIGGERER or {ti.id for ti in now.lock_tasks} <= {ti for ti, _ in processes}
        if (ended and noted) or time.monotonic() > deadline:
            return now
        time.sleep(POLL)


def _keep(console: Console, deployments: Sequence[Deployment]) -> None:
    """Stay until Ctrl-C, which here is not an interruption but the way to end."""
    for deployment in deployments:
        login = f"user {deployment.username}, password {deployment.password}"
        console.print(f"{deployment.name}: {deployment.url}/dags/{DAG} ({login})", soft_wrap=True)
    console.print("Both stay up until Ctrl-C.")
    with suppress(KeyboardInterrupt):
        signal.pause()


def _create_lock_table(endpoint_url: str) -> None:
    dynamodb = boto3.client(
        "dynamodb",
        region_name=REGION,
        endpoint_url=endpoint_url,
        aws_access_key_id=CREDENTIALS,
        aws_secret_access_key=CREDENTIALS,
    )
    LockClient(dynamodb, table=TABLE).create_table()


def _deployment(name: str, home: Path, endpoint_url: str, journal: Path) -> Deployment:
    """A deployment whose connections lead to the lock table."""
    lock = {
        "table": TABLE,
        "aws_conn_id": "aws_default",
        "region_name": REGION,
        "deployment": name,
    }
    environment = {
        # The connection names no endpoint, as where the table is in AWS.
        "AWS_ENDPOINT_URL_DYNAMODB": endpoint_url,
        "AIRFLOW_CONN_AWS_DEFAULT": json.dumps(
            {"conn_type": "aws", "login": CREDENTIALS, "password": CREDENTIALS}
        ),
        "AIRFLOW_CONN_DYNAMO_LOCK_DEFAULT": json.dumps({"conn_type": "dynamo_lock", "extra": lock}),
        "DEMO_DEPLOYMENT": name,
        "DEMO_LEDGER": str(journal),
    }
    return Deployment(name, home, DAGS, env=environment, parallelism=WORKER_SLOTS)
