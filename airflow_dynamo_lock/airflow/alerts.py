"""Alerts: call a notifier of Airflow when a task has waited for a lock, or has held it, for too long.

The wait and the heartbeats of a group run in the triggerer, so its alerts are sent from there. It has no access to the
objects of a DAG file. Therefore an alert names the class of a notifier and its arguments, as JSON.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import pkgutil
import re
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

from airflow_dynamo_lock.airflow import lock_options
from airflow_dynamo_lock.airflow.trigger_base import in_background
from airflow_dynamo_lock.airflow.versions import XCom, in_thread, notifies_async
from airflow_dynamo_lock.core.model.arguments import Seconds, seconds
from airflow_dynamo_lock.core.model.errors import LockValueError
from airflow_dynamo_lock.core.model.text import shown
from airflow_dynamo_lock.monitoring.checks import long_hold, long_wait

if TYPE_CHECKING:
    from airflow_dynamo_lock.airflow.versions import Context
    from airflow_dynamo_lock.client.sync_client import LockClient
    from airflow_dynamo_lock.core.model.lease import Lease
    from airflow_dynamo_lock.core.model.record import LockRecord


_A_NOTIFIER = "The notifier of a LockAlert must be a notifier's class or its import path"


@dataclass(frozen=True)
class LockAlert:
    """A message to send when a task has waited for a lock, or has held it, for too long.

    ``on_wait=LockAlert(timedelta(minutes=30), SlackNotifier, {"text": "{{ lock_alert.text }}"})``

    It is sent once for each wait, or for each lease. If it cannot be sent, the task's log says why, and the task goes
    on.

    :param after: time to wait, or to hold, before the message is sent, in seconds or as timedelta.
    :param notifier: the notifier's class, or its path as text, such as ``"package.module.Class"``. Airflow's
        triggerer has to be able to import it.
    :param kwargs: the arguments of the notifier, as values that JSON has. They are stored with the DAG, so they should
        name a connection instead of a password. Their templates can use ``lock_alert.text``, a sentence with the lock,
        the task and the holders; ``lock_alert.key``; ``lock_alert.seconds``; and ``ti``, ``dag_id`` and ``run_id``.
    :raises LockValueError: a parameter is not valid.
    """

    after: Seconds
    notifier: type[Any] | str
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.notifier, (type, str)):
            raise LockValueError(f"{_A_NOTIFIER}, not {shown(self.notifier)}: leave its arguments to kwargs.")
        if "<locals>" in self.path or self.path.startswith(("unusual_prefix_", "__main__:")):
            raise LockValueError(
                f"The notifier {self.path.partition(':')[2]!r} of a LockAlert is defined in a DAG file or a function, "
                "where the triggerer cannot import it: define it in a module or in a plugin."
            )
        if not re.fullmatch(r"\w+([.:]\w+)+", self.path):
            raise LockValueError(
                f"{_A_NOTIFIER}, not {shown(self.path)}: write the path as 'package.module.Class'."
            )
        if not isinstance(self.kwargs, Mapping) or not all(isinstance(name, str) for name in self.kwargs):
            # Without the value: it may be a secret (R12).
            raise LockValueError(
                "The kwargs of a LockAlert must be a dictionary of the notifier's arguments by name, "
                f"not of type {type(self.kwargs).__name__}."
            )
        if isinstance(self.notifier, type):
            try:
                inspect.signature(self.notifier).bind(**self.kwargs)
            except TypeError as failure:
                raise LockValueError(
                    f"The kwargs of a LockAlert do not fit {self.notifier.__name__}: {failure}."
                ) from None
        self.as_json()  # checks `after` and the values of `kwargs`

    @cached_property
    def after_seconds(self) -> float:
        """The time `after` in seconds."""
        return seconds("after", self.after)

    @property
    def path(self) -> str:
        """Where to import the notifier from."""
        if isinstance(self.notifier, str):
            return self.notifier
        return f"{self.notifier.__module__}:{self.notifier.__qualname__}"

    def as_json(self) -> str:
        """The alert as an argument of a trigger. `from_json` reads it.

        Airflow would render the templates of a trigger's arguments before there is anything to report, so the braces
        of the notifier's templates are escaped.
        """
        values = {
            "after": self.after_seconds,
            "notifier": self.path,
            "kwargs": dict(self.kwargs),
        }
        try:
            text = json.dumps(values)
        except (TypeError, ValueError) as failure:
            raise LockValueError(
                f"The kwargs of a LockAlert must be values that JSON has: {failure}."
            ) from None
        return text.replace("{{", "\\u007b{").replace("{%", "\\u007b%")

    @classmethod
    def from_json(cls, text: str) -> LockAlert:
        """The alert that `as_json` has written."""
        return cls(**json.loads(text))

    def create_notifier(self) -> Any:
        """Import the notifier's class, and create the notifier."""
        notifier = pkgutil.resolve_name(self.path) if isinstance(self.notifier, str) else self.notifier
        return notifier(**self.kwargs)


@dataclass(frozen=True)
class Report:
    """What an alert says. Templates of the notifier have it as ``lock_alert``.

    :ivar text: a sentence with the lock, the task and the holders.
    :ivar key: name of the lock.
    :ivar seconds: how long the task has waited for the lock, or has held it.
    """

    text: str
    key: str
    seconds: float


def report_of_wait(owner: str, since: float, record: LockRecord) -> Report:
    """What to say of a wait for a lock.

    :param owner: name of the waiter.
    :param since: when the wait has begun, in epoch seconds.
    :param record: the lock.
    """
    waited = max(0.0, time.time() - since)
    return Report(long_wait(owner, round(waited * 1000), record), record.key, waited)


def report_of_hold(lease: Lease, record: LockRecord | None) -> Report | None:
    """What to say of a lease; None if it is not held any more.

    :param lease: the lease.
    :param record: its lock.
    """
    holder = record.holders.get(lease.lease_id) if record is not None else None
    if record is None or holder is None:
        return None
    now_ms = round(time.time() * 1000) if record.read_at_ms is None else record.read_at_ms
    held_ms = max(0, now_ms - lease.acquired_at_ms)
    return Report(long_hold(lease.key, holder, held_ms, now_ms), lease.key, held_ms / 1000)


def checked(name: str, alert: Any) -> LockAlert | None:
    """The alert that was given as the parameter `name`.

    :raises LockValueError: it is neither a `LockAlert` nor None.
    """
    if alert is None or isinstance(alert, LockAlert):
        return alert
    raise LockValueError(f"{name} must be a LockAlert, not {shown(alert)}.")


@asynccontextmanager
async def in_triggerer(
    trigger: Any,
    name: str,
    *,
    since: Callable[[], Awaitable[float]],
    report: Callable[[], Awaitable[Report | None]],
) -> AsyncIterator[None]:
    """Send an alert from a trigger if the ``async with`` block takes too long.

    :param trigger: a `LockTrigger` that has the alert, as `LockAlert.as_json` returns it, or None, which sends nothing.
    :param name: the attribute that has it, which names the alert in the log.
    :param since: returns when the wait, or the lease, has begun, in epoch seconds.
    :param report: returns what to say; None if there is nothing to say any more.
    """
    alert: str | None = getattr(trigger, name)
    if alert is None:
        yield
        return
    watching = asyncio.ensure_future(
        _watch(LockAlert.from_json(alert), name, trigger.ti, trigger.log, since, report)
    )
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.wait((watching,))


async def _watch(
    alert: LockAlert,
    name: str,
    ti: Any,
    log: Any,
    since: Callable[[], Awaitable[float]],
    report: Callable[[], Awaitable[Report | None]],
) -> None:
    try:
        remaining = await since() + alert.after_seconds - time.time()
        sent = lock_options.xcom_arguments(ti, ti.task_id, f"{name}_sent")
        # Another triggerer may have sent it, and may have been stopped since. Each try of the task sends its own.
        if remaining <= 0 and await in_thread(XCom.get_one, **sent) == ti.try_number:
            return
        await asyncio.sleep(remaining)
        if (said := await report()) is None:
            return
        # If the wait ends now, the message that is being sent is still sent.
        await asyncio.shield(in_background(_send(alert.create_notifier(), _context(ti, said))))
        log.info("Sent the alert %s: %s", name, said.text)
        await in_thread(XCom.set, value=ti.try_number, **sent)
    except Exception as failure:
        log.error("The alert %s will not be sent, because of %s: %s", name, type(failure).__name__, failure)


async def _send(notifier: Any, context: Context) -> None:
    if notifies_async(notifier):
        notifier.context = context
        await notifier
    else:
        await in_thread(notifier, context)


def _context(ti: Any, report: Report) -> Context:
    """The context of a notifier in the triggerer, which has no DAG."""
    context: Any = {
        "ti": ti,
        "task_instance": ti,
        "dag": None,  # Airflow 3.0 asks for it
        "dag_id": ti.dag_id,
        "run_id": ti.run_id,
        "lock_alert": asdict(report),
    }
    return context  # type: ignore[no-any-return]


def on_held_on_worker(
    task: Any, context: Context, client: LockClient, lease: Lease
) -> AbstractContextManager[None]:
    """`on_worker` for the alert ``on_held`` of a lease."""
    since = lease.acquired_at_ms / 1000
    return on_worker(
        task, "on_held", context, since=since, report=lambda: report_of_hold(lease, client.get(lease.key))
    )


@contextmanager
def on_worker(
    task: Any, name: str, context: Context, *, since: float, report: Callable[[], Report | None]
) -> Iterator[None]:
    """Send an alert from the process of a task, in a thread, if the ``with`` block takes too long.

    :param task: an operator that has the alert, or None, which sends nothing.
    :param name: the attribute that has it, which names the alert in the log.
    :param context: the context of the task.
    :param since: when the wait, or the lease, has begun, in epoch seconds.
    :param report: returns what to say; None if there is nothing to say any more.
    """
    alert: LockAlert | None = getattr(task, name)
    if alert is None:
        yield
        return

    def send() -> None:
        try:
            if (said := report()) is not None:
                alert.create_notifier()({**context, "lock_alert": asdict(said)})
                task.log.info("Sent the alert %s: %s", name, said.text)
        except Exception as failure:
            task.log.error(
                "The alert %s will not be sent, because of %s: %s", name, type(failure).__name__, failure
            )

    timer = threading.Timer(max(0.0, since + alert.after_seconds - time.time()), send)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
