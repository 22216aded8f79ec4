"""Fencing: the database refuses a writer that has lost the lock without having noticed.

A process may be paused after its last look at the lease, and write when somebody else holds the lock. Each grant of a
lock has a larger token than the one before. A row that remembers the largest token it saw can tell the two apart.
"""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from airflow.sdk import DAG, get_current_context, task

from airflow_dynamo_lock import DynamoLock

# A file, so that the example needs no database. Yours is one that all workers share.
DATABASE = Path(tempfile.gettempdir()) / "dynamo_lock_fencing.db"


@task
def prepare() -> None:
    with closing(sqlite3.connect(DATABASE)) as db, db:
        db.execute("CREATE TABLE IF NOT EXISTS account (name PRIMARY KEY, balance INTEGER, token INTEGER)")
        db.execute("INSERT OR IGNORE INTO account VALUES ('cash', 0, 0)")


@task
def deposit(amount: int) -> None:
    token = get_current_context()["dynamo_lock"].token
    with closing(sqlite3.connect(DATABASE)) as db, db:
        # Not <, because one lease may write more than once.
        written = db.execute(
            "UPDATE account SET balance = balance + ?, token = ? WHERE name = 'cash' AND token <= ?",
            (amount, token, token),
        )
        if not written.rowcount:
            raise RuntimeError("A later holder of the lock has written already: this write came too late.")


with DAG("dynamo_lock_fencing", schedule=None, doc_md=__doc__):
    with DynamoLock("bank/cash") as lock:
        deposit(100)
    prepare() >> lock
