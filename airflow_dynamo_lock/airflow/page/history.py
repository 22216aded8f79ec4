"""The last hour of a lock: who waited for it and who held it, and when.

The record has the present holders and waiters of all deployments. Of earlier ones, only the runs of this deployment
are known, by the results of their tasks: of a task that was tried again, its last try.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from airflow.models.dagrun import DagRun
from airflow.models.taskinstance import TaskInstance
from airflow.models.xcom import XComModel
from sqlalchemy import and_, or_, select, tuple_
from sqlalchemy.orm import Session

from airflow_dynamo_lock.airflow.last_task import RELEASED_KEY
from airflow_dynamo_lock.airflow.lock_options import LEASES_KEY, about
from airflow_dynamo_lock.airflow.page.rows import Viewer
from airflow_dynamo_lock.core.model.errors import LockError
from airflow_dynamo_lock.core.model.lease import Lease
from airflow_dynamo_lock.core.model.state import LockState
from airflow_dynamo_lock.core.model.text import iso, utc

if TYPE_CHECKING:
    from sqlalchemy import Select

SHOWN = timedelta(hours=1)
# Of runs that began earlier, only those that still run are read. `_MOST_TASKS` limits the tasks that are read.
_RUNS_SINCE, _MOST_TASKS = timedelta(days=1), 2000
# What an XCom and its task have in common.
_IDENTITY = ("dag_id", "run_id", "task_id", "map_index")


@dataclass(frozen=True)
class Turn:
    """One wait for a lock and one lease. A time is None if it is not known, or has not come yet.

    :ivar owner: who waited, and held the lock.
    :ivar link: path of its task in the web interface; None if the viewer may not follow it.
    :ivar waited_since: when it began to wait.
    :ivar held_since: when it was granted the lock.
    :ivar ended: when the lease, or the wait, has ended.
    :ivar has_ended: whether it has ended.
    """

    owner: str
    link: str | None = None
    waited_since: datetime | None = None
    held_since: datetime | None = None
    ended: datetime | None = None
    has_ended: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The turn as JSON values."""
        return {
            "owner": self.owner,
            "link": self.link,
            "waited_since": iso(self.waited_since),
            "held_since": iso(self.held_since),
            "ended": iso(self.ended),
            "has_ended": self.has_ended,
        }


def last_hour(session: Session, state: LockState, viewer: Viewer) -> list[Turn]:
    """The turns of a lock that have not ended or that have ended in the last hour, the earliest first. If the end is
    not known, the time of the grant counts.

    :param session: a session of Airflow's database.
    :param state: the lock.
    :param viewer: runs of DAGs that the viewer may not read are left out, unless the record has them.
    """
    now = utc(state.now_ms)
    turns = dict(_of_runs(session, state.record.key, viewer, now))
    for lease_id, holder in state.record.holders.items():
        known = turns.get(lease_id, Turn(holder.owner, viewer.link(holder.about)))
        turns[lease_id] = replace(known, held_since=holder.acquired_at, ended=None, has_ended=False)
    for waiter in state.waiters:
        turns[waiter.lease_id] = Turn(waiter.owner, viewer.link(waiter.about), utc(waiter.since_ms))
    previous = state.record.previous_owner
    if previous is not None and previous not in {each.owner for each in turns.values()}:
        freed_at_ms = state.record.last_freed_at_ms
        turns[""] = Turn(previous, ended=utc(freed_at_ms) if freed_at_ms else None, has_ended=True)
    since = now - SHOWN
    shown = [
        each
        for each in turns.values()
        if not each.has_ended or (each.ended or each.held_since or now) >= since
    ]
    return sorted(shown, key=lambda each: each.waited_since or each.held_since or each.ended or now)


def _of_runs(session: Session, key: str, viewer: Viewer, now: datetime) -> Iterator[tuple[str, Turn]]:
    """The turns of this deployment's runs, by lease id. Those that the record does not have have ended."""
    found = [
        (lease, ti, result.key)
        for result, ti in session.execute(_results(now))
        if ti.dag_id in viewer.dag_ids and (lease := _lease(result.value, key)) is not None
    ]
    runs = {(ti.dag_id, ti.run_id) for _, ti, _ in found}
    releases = _releases(session, runs) if runs else _Releases({}, {})
    for lease, ti, result_key in found:
        link = viewer.link(about(ti, viewer.deployment))
        ended = ti.end_date if result_key == LEASES_KEY else releases.of(ti)
        yield (
            lease.lease_id,
            Turn(lease.owner, link, ti.start_date, lease.acquired_at, ended, has_ended=True),
        )


def _results(now: datetime) -> Select[XComModel, TaskInstance]:
    """The query for the results of tasks that have acquired locks, and these tasks, the latest first."""
    return (
        select(XComModel, TaskInstance)
        .join(
            TaskInstance,
            and_(*(getattr(TaskInstance, each) == getattr(XComModel, each) for each in _IDENTITY)),
        )
        .join(DagRun, DagRun.id == XComModel.dag_run_id)
        .where(
            or_(DagRun.run_after >= now - _RUNS_SINCE, DagRun.end_date.is_(None)),
            or_(
                XComModel.key == LEASES_KEY,
                and_(XComModel.key == "return_value", TaskInstance.operator == "DynamoLockAcquireOperator"),
            ),
        )
        .order_by(XComModel.timestamp.desc())
        .limit(_MOST_TASKS)
    )


def _lease(value: Any, key: str) -> Lease | None:
    """The lease of a lock in the result of a task; None if it has none, or if the result is not in the database."""
    for each in value if isinstance(value, list) else [value]:
        if isinstance(each, dict) and each.get("key") == key:
            with suppress(LockError):
                return Lease.from_dict(each)
    return None


@dataclass(frozen=True)
class _Releases:
    """When the leases of runs were released.

    :ivar by_last_task: by acquire task: when its group's last guarded task has released its leases.
    :ivar by_task: by group: when its release task has ended. Groups with several release tasks are left out, because
        Airflow's database does not have which lease each one releases.
    """

    by_last_task: Mapping[tuple[Any, ...], datetime]
    by_task: Mapping[tuple[Any, ...], datetime | None]

    def of(self, acquire: TaskInstance) -> datetime | None:
        """When the leases of an acquire task were released; None if that is not known."""
        return self.by_last_task.get(_identity(acquire)) or self.by_task.get(_group(acquire))


def _releases(session: Session, runs: Collection[tuple[str, str]]) -> _Releases:
    by_task = select(TaskInstance, TaskInstance.end_date).where(
        tuple_(TaskInstance.dag_id, TaskInstance.run_id).in_(runs),
        TaskInstance.operator == "DynamoLockReleaseOperator",
    )
    # The last guarded task stores this as a result of the acquire task.
    by_last_task = select(XComModel, XComModel.timestamp).where(
        tuple_(XComModel.dag_id, XComModel.run_id).in_(runs), XComModel.key == RELEASED_KEY
    )
    ends: dict[tuple[Any, ...], list[datetime | None]] = {}
    for release, ended in session.execute(by_task):
        ends.setdefault(_group(release), []).append(ended)
    return _Releases(
        {_identity(acquire): at for acquire, at in session.execute(by_last_task)},
        {group: ended[0] for group, ended in ends.items() if len(ended) == 1},
    )


def _identity(each: TaskInstance | XComModel) -> tuple[Any, ...]:
    return tuple(getattr(each, name) for name in _IDENTITY)


def _group(each: TaskInstance) -> tuple[Any, ...]:
    """The group of tasks that share a lease. Operators without a group have the DAG for one."""
    return each.dag_id, each.run_id, each.task_id.rpartition(".")[0], each.map_index
