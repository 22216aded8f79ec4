"""Fencing tokens: the database refuses late writes from a process that has lost the lock.

A process may be paused after it has checked its lease, and write when another run already holds the lock.
Each grant of a lock has a larger token than the grant before. Each write stores its token in the row, and the
row accepts no write with a smaller token than the stored one.
"""

from __future__ import annotations

import sqlite3
import tempfile
from contextlib import closing
from pathlib import Path

from airflow.sdk import DAG, get_current_context, task

from airflow_dynamo_lock import DynamoLock

# A local file, so that the example needs no server. In production, all workers share a database.
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
        # `<=` and not `<`, because one lease may write more than once.
        written = db.execute(
            "UPDATE account SET balance = balance + ?, token = ? WHERE name = 'cash' AND token <= ?",
            (amount, token, token),
        )
        if not written.rowcount:
            raise RuntimeError(
                "A later holder of the lock has already written: start a new run to deposit the amount."
            )


with DAG("dynamo_lock_fencing", schedule=None, doc_md=__doc__):
    with DynamoLock("bank/cash") as lock:
        deposit(100)
    prepare() >> lock
