"""``dynamo-lock doctor``: check everything that a lock needs, and report how to fix what is missing."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import click

from airflow_dynamo_lock.cli import show
from airflow_dynamo_lock.cli.options import Settings, airflow_hook, settings
from airflow_dynamo_lock.core.foreign.registry import NATIVE
from airflow_dynamo_lock.core.model.errors import LockAccessError, LockError, LockTimeoutError, LockValueError
from airflow_dynamo_lock.defaults import DEFAULT_CONN_ID

_OK, _WARNING, _BAD = "ok", "warning", "BAD"
_MARKS = {_OK: ("✓", "green"), _WARNING: ("!", "yellow"), _BAD: ("✗", "red")}
# Warn if this machine's clock is off by more, in seconds. Locks do not rely on it, but people read logs by it.
_MAX_CLOCK_OFFSET = 5.0
# The lock that the permission check acquires. The name never changes, because a role without permission to delete
# leaves the record in the table.
_KEY = "dynamo-lock doctor"


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    :ivar what: subject of the check.
    :ivar verdict: ``ok``, ``warning`` or ``BAD``.
    :ivar found: what the check found, for people to read.
    """

    what: str
    verdict: str
    found: str


@click.command()
@settings
def doctor(where: Settings) -> int:
    """Check all that a lock needs, and say what to do.

    Credentials, the table with its keys and its time to live, the permissions (with a lock of its own), this machine's
    clock, and Airflow's connection, where Airflow is installed. Exits with 1 if one is wrong.
    """
    findings = []
    for finding in _findings(where):
        findings.append(finding)
        if not where.as_json:
            mark, colour = _MARKS[finding.verdict]
            click.echo(f"{click.style(mark, fg=colour, bold=True)} {finding.what}: {finding.found}")
    if where.as_json:
        show.as_json([vars(each) for each in findings])
    return 1 if any(each.verdict == _BAD for each in findings) else 0


def _findings(where: Settings) -> Iterator[Finding]:
    """Run the checks one by one. Without AWS credentials, skip those that need AWS."""
    yield (aws := _check("AWS", lambda: _aws(where)))
    if aws.verdict == _OK:
        yield (table := _check("table", lambda: _table(where)))
        if table.verdict != _BAD:
            yield _check("permissions", lambda: _permissions(where))
        yield _check("clock", lambda: _clock(where))
    if find_spec("airflow") is not None:
        yield _check("Airflow", _airflow)


def _check(what: str, check: Callable[[], str]) -> Finding:
    """Run one check, and turn its errors into a finding."""
    try:
        return Finding(what, _OK, check())
    except LockError as failure:
        return Finding(what, _BAD, str(failure))
    except _Warning as warning:
        return Finding(what, _WARNING, str(warning))


class _Warning(Exception):
    """A check found something that does not prevent locks from working."""


def _aws(where: Settings) -> str:
    """Find the credentials, the endpoint and the region that are used."""
    from botocore.exceptions import BotoCoreError

    from airflow_dynamo_lock.client.sdk import without_password

    client = where.aws
    try:
        credentials = client._request_signer._credentials
        known = credentials and credentials.get_frozen_credentials().access_key
    except (BotoCoreError, OSError, ValueError) as failure:
        raise LockAccessError(
            f"The AWS credentials cannot be loaded ({failure}): renew them, or check the profile."
        ) from failure
    if not known:
        raise LockAccessError(
            "There are no AWS credentials: set AWS_PROFILE, or AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, "
            "or give this machine a role."
        )
    return (
        f"credentials from {credentials.method} (…{known[-4:]}) for {without_password(client.meta.endpoint_url)}, "
        f"region {client.meta.region_name}"
    )


def _table(where: Settings) -> str:
    """Check the table with its keys and its time to live, or that the bucket can be listed."""
    locks = where.locks()
    try:
        locks.check_table()
        if where.format == "s3":
            return f"the bucket {where.table!r} can be listed"
        described = locks.describe_table()
    except LockAccessError as refused:
        raise _Warning(f"only the commands `table` and `doctor` need this permission: {refused}") from None
    stream = "with" if described.get("StreamSpecification", {}).get("StreamEnabled") else "without"
    return f"{where.table!r} can hold locks; {stream} a stream, about {described.get('ItemCount', 0)} items"


def _permissions(where: Settings) -> str:
    """Try each operation on the lock `_KEY`, which only this command uses."""
    locks = where.locks(lease=30.0)
    lease = locks.acquire(_KEY, timeout=60.0)  # another `doctor` may hold it

    def wait() -> None:
        with suppress(LockTimeoutError):  # enqueues, polls, and dequeues when the time is up
            locks.acquire(_KEY, timeout=0.3, poll_interval=0.1)
        if where.format == NATIVE:
            locks.waiters(_KEY)

    checks: dict[str, Callable[[], object]] = {
        "waiting": wait,
        "`list` and `watch`": lambda: next(locks.list_locks(), None),
    }
    refusals = []
    try:
        locks.renew(lease)
        for need, check in checks.items():
            try:
                check()
            except LockAccessError as refused:
                refusals.append(f"only needed for {need}: {refused}")
    finally:
        locks.release(lease)
    with suppress(LockAccessError, LockValueError):
        # No program uses the tokens of this lock, so its record may be deleted at once. The record stays while
        # another `doctor` holds the lock or waits for it.
        locks._run(locks._core.operations.admin.forget(_KEY, at_once=True))
    if refusals:
        raise _Warning("; ".join(["a lock can be acquired, renewed and released", *refusals]))
    return "a lock can be acquired, renewed, waited for, looked at, listed and released"


def _clock(where: Settings) -> str:
    """Compare this machine's clock with the ``Date`` header of an answer, which has whole seconds."""
    from email.utils import parsedate_to_datetime

    from botocore.exceptions import BotoCoreError, ClientError

    sent = time.time()
    try:
        if where.format == "s3":
            answer: Any = where.aws.list_objects_v2(Bucket=where.table, MaxKeys=1)
        else:
            answer = where.aws.describe_table(TableName=where.table)
    except ClientError as refused:
        answer = refused.response
    except (BotoCoreError, OSError, ValueError):  # the SDK does not wrap all errors of a wrong endpoint URL
        raise _Warning("AWS cannot be reached to compare it with") from None
    date = answer.get("ResponseMetadata", {}).get("HTTPHeaders", {}).get("date")
    if date is None:
        raise _Warning(
            "the endpoint sends no Date header, so a dead holder is detected only after a whole lease"
        )
    off = (sent + time.time()) / 2 - parsedate_to_datetime(date).timestamp() - 0.5
    if abs(off) > _MAX_CLOCK_OFFSET:
        raise _Warning(
            f"{abs(off):.0f} s {'ahead of' if off > 0 else 'behind'} AWS's: no lock relies on it, but people read "
            "logs by it; let the machine synchronise it"
        )
    return f"within {max(1.0, abs(off)):.0f} s of AWS's"


def _airflow() -> str:
    """Read the default connection or, if there is none, the configuration."""
    try:
        connected = airflow_hook(DEFAULT_CONN_ID).settings
    except LockError:
        raise
    except Exception as failure:  # Airflow may be installed but not set up
        raise _Warning(
            f"it is installed, but cannot be loaded ({type(failure).__name__}: {failure})"
        ) from None
    return f"{DEFAULT_CONN_ID} uses the table {connected.table!r}, and the aws connection {connected.aws_conn_id!r}"
