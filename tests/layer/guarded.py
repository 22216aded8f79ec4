"""A guarded task in a process of its own, which resists being stopped.

``python -m tests.layer.guarded ENDPOINT_URL LEASE BODY`` enters the lease, and prints a line for each event.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

import boto3

from airflow_dynamo_lock import Lease, LockClient, sdk_config
from airflow_dynamo_lock.airflow.guard import Guard


@contextmanager
def guarded(endpoint_url: str, lease: Lease, body: str) -> Iterator[subprocess.Popen[str]]:
    """Run the process during the `with` block, and yield it after it has entered the lease."""
    arguments = [sys.executable, "-m", __name__, endpoint_url, json.dumps(lease.as_dict()), body]
    process = subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert process.stdout
        assert process.stdout.readline() == "entered\n"
        yield process
    finally:
        process.kill()
        process.communicate()


class Task:
    def on_kill(self) -> None:
        report("on_kill")


def report(line: str) -> None:
    print(line, flush=True)


def swallows(exceptions: type[BaseException]) -> None:
    while True:
        try:
            threading.Event().wait()
        except exceptions as failure:
            report(f"swallowed {type(failure).__name__}")


def has_its_own_handler() -> None:
    signal.signal(signal.SIGUSR2, lambda *_: report("signalled"))
    threading.Event().wait()


def has_a_child() -> None:
    child = subprocess.Popen(["sleep", "600"], start_new_session=True, stdout=subprocess.DEVNULL)
    report(f"child {child.pid}")
    swallows(BaseException)


def is_in_a_thread() -> None:
    threading.Event().wait()


BODIES: dict[str, Callable[[], None]] = {
    "swallows exceptions": partial(swallows, Exception),
    "swallows everything": partial(swallows, BaseException),
    "has its own handler": has_its_own_handler,
    "has a child": has_a_child,
    "is in a thread": is_in_a_thread,
}


def main() -> None:
    logging.basicConfig(format="%(message)s", force=True)  # replaces Airflow's configuration
    endpoint_url, lease, body = sys.argv[1:]
    aws = boto3.client("dynamodb", endpoint_url=endpoint_url, config=sdk_config())
    guard = Guard(LockClient(aws, table="locks"), [Lease.from_dict(json.loads(lease))], Task())

    def work() -> None:
        guard.enter()
        report("entered")
        BODIES[body]()

    try:
        if BODIES[body] is is_in_a_thread:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
        else:
            work()
    except BaseException as failure:
        report(f"ended by {type(failure).__bases__[0].__name__}: {failure}")
        os._exit(3)


if __name__ == "__main__":
    main()
