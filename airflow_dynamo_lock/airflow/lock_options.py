"""Between Airflow and the lock: what a task wants, under which name it holds, and its leases as an XCom."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from airflow_dynamo_lock.core.model import arguments
from airflow_dynamo_lock.core.model.arguments import Seconds, seconds
from airflow_dynamo_lock.core.model.errors import LockNotHeldError, LockValueError
from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet
from airflow_dynamo_lock.core.model.limits import RELEASE_GRACE
from airflow_dynamo_lock.core.model.record import LockRecord, QueuePosition

if TYPE_CHECKING:
    from airflow_dynamo_lock.airflow.hooks import LockSettings
    from airflow_dynamo_lock.client.options import ClaimOptions, Mode

OnTimeout = Literal["fail", "skip"]

#: Beats of the keeper in one lease. So many may fail before it is lost.
BEATS_PER_LEASE = 12

#: What the author of a task may say of the lock that it takes, and what counts if he does not. All of it may be
#: templates. `DynamoLockAcquireOperator` says what each one means.
PARAMETERS: Mapping[str, Any] = {
    "key": None,
    "lease": None,
    "timeout": None,
    "slots": 1,
    "capacity": 1,
    "mode": "exclusive",
    "min_hold": None,
    "fair": True,
    "priority": 0,
    "release_grace": RELEASE_GRACE,
}
# Of these, one is checked by the others.
_OF_CAPACITY = {"slots", "capacity", "mode"}


@dataclass(frozen=True)
class Wanted:
    """What to acquire, its templates rendered.

    :ivar keys: without repetition, in the author's order.
    :ivar lease: seconds; None for the connection's default.
    :ivar timeout: seconds; None waits without end.
    :ivar min_hold: seconds; None for not at all.
    """

    keys: tuple[str, ...]
    lease: float | None
    timeout: float | None
    slots: int
    capacity: int
    mode: Mode
    min_hold: float | None
    fair: bool
    priority: int
    release_grace: float

    @classmethod
    def of(cls, task: Any) -> Wanted:
        """From an operator's or a trigger's attributes, named as the `PARAMETERS` are.

        :raises LockValueError: one of them cannot be.
        """
        return cls._of({name: getattr(task, name) for name in PARAMETERS})

    @classmethod
    def check_early(cls, operator: Any) -> None:
        """Check what is known when the DAG is parsed: what is not a template.

        :raises LockValueError: one of them cannot be.
        """
        given = {name: getattr(operator, name) for name in PARAMETERS}
        unknown = {name for name, value in given.items() if is_template(value)}
        if unknown & _OF_CAPACITY:
            unknown |= _OF_CAPACITY
        known = {name: value for name, value in given.items() if name not in unknown}
        cls._of({**PARAMETERS, "key": "not known yet", **known})

    @classmethod
    def _of(cls, given: Mapping[str, Any]) -> Wanted:
        slots, capacity = whole("slots", given["slots"]), whole("capacity", given["capacity"])
        arguments.checked_mode(given["mode"], slots, capacity)
        return cls(
            keys=checked_keys(given["key"]),
            lease=optional_seconds("lease", given["lease"]),
            timeout=optional_seconds("timeout", given["timeout"], zero=True),
            slots=slots,
            capacity=capacity,
            mode=given["mode"],
            min_hold=optional_seconds("min_hold", given["min_hold"]),
            fair=arguments.checked_flag("fair", _FLAGS.get(str(given["fair"]), given["fair"])),
            priority=arguments.checked_priority(whole("priority", given["priority"])),
            release_grace=seconds("release_grace", _number("release_grace", given["release_grace"])),
        )


def checked_keys(key: Any) -> tuple[str, ...]:
    """One or more keys, each one good, none twice, and no more than can be taken together."""
    if isinstance(key, set):
        key = sorted(key, key=str)
    return arguments.checked_keys([key] if isinstance(key, str) else key)


def is_template(value: Any) -> bool:
    """Whether an argument is not known before the task runs: a template, or a reference to another task's result."""
    return hasattr(value, "resolve") or "{{" in str(value) or "{%" in str(value)


def optional_seconds(name: str, value: Seconds | str | None, *, zero: bool = False) -> float | None:
    """A duration in seconds from an argument or from what a template rendered to; None stays None."""
    if value is None or value in ("", "None"):
        return None
    return seconds(name, _number(name, value), zero=zero)


def whole(name: str, value: Any) -> int:
    """A whole number from an argument or from what a template rendered to. Whether it is one is checked later."""
    try:
        return int(value) if isinstance(value, str) else value
    except ValueError:
        raise LockValueError(f"{name} must be a whole number, not {value!r}.") from None


def interval(heartbeat: Seconds | str | None, lease_seconds: float) -> float:
    """Seconds between the keeper's beats."""
    beat = optional_seconds("heartbeat", heartbeat)
    return arguments.checked_heartbeat(
        lease_seconds / BEATS_PER_LEASE if beat is None else beat, lease_seconds
    )


def plain(value: Any) -> Any:
    """A duration as a trigger's argument: seconds, or the template that will render to them."""
    return value.total_seconds() if hasattr(value, "total_seconds") else value


def claim_options(ti: Any, settings: LockSettings, wanted: Wanted) -> ClaimOptions:
    """Hold as this task instance: its id is the lease id (rule R7), its name is for people to read."""
    where = f"{ti.dag_id}/{ti.run_id}/{ti.task_id}" + (f"[{ti.map_index}]" if ti.map_index >= 0 else "")
    return {
        "lease_id": str(ti.id),
        "owner": f"{settings.deployment}/{where}",
        # The version's id is the deployment's own, so two deployments of the same name are still told apart.
        "attempt_of": f"{getattr(ti, 'dag_version_id', None)}/{where}",
        "about": {
            "deployment": settings.deployment,
            "dag_id": ti.dag_id,
            "run_id": ti.run_id,
            "task_id": ti.task_id,
            "map_index": str(ti.map_index),
            "try_number": str(ti.try_number),
        },
        "lease": wanted.lease,
        "release_grace": wanted.release_grace,
        "slots": wanted.slots,
        "capacity": wanted.capacity,
        "mode": wanted.mode,
        "min_hold": wanted.min_hold,
        "fair": wanted.fair,
        "priority": wanted.priority,
    }


def as_result(leases: Iterable[Lease], wanted_keys: Sequence[str], *, many: bool) -> Any:
    """The acquired leases as the task's result: a dictionary for one key, a list of them where a list was asked for."""
    by_key = {lease.key: lease.as_dict() for lease in leases}
    values = [by_key[key] for key in wanted_keys]
    return values if many else values[0]


def from_result(result: Any, acquire_task_id: str) -> LeaseSet:
    """The leases in the result of an acquire task.

    :raises LockNotHeldError: there is none.
    """
    values = [result] if isinstance(result, dict) else result
    if not values:
        raise LockNotHeldError(
            f"The task {acquire_task_id!r} has acquired no lease in this run, so nothing may work under it: "
            "clear it, if somebody marked it as successful by hand."
        )
    return LeaseSet(tuple(Lease.from_dict(value) for value in values))


def xcom_of(ti: Any, task_id: str, key: str = "return_value") -> dict[str, Any]:
    """Where an XCom of a task in the same run and map index is; without a key, its result."""
    return {
        "key": key,
        "dag_id": ti.dag_id,
        "run_id": ti.run_id,
        "task_id": task_id,
        "map_index": ti.map_index,
    }


def busy_log(log: Any) -> Callable[[LockRecord], None]:
    """Tells the task's log who holds the lock that it waits for, once for each holder."""
    told: set[str] = set()

    def tell(record: LockRecord) -> None:
        if not told.issuperset(record.holders):
            log.info("Waiting for the lock %r. %s.", record.key, record.describe())
        told.clear()
        told.update(record.holders)

    return tell


def place_log(log: Any) -> Callable[[QueuePosition], None]:
    """Tells the task's log its place in line, once for each; far from the head, once for each ten places: hundreds may
    move up at the same moment.

    It is called by the poller that all who wait in this process share. Airflow tells by the context whose log a line is
    for, so each is written in that of the task.
    """
    context = copy_context()
    told: tuple[object, ...] | None = None

    def tell(standing: QueuePosition) -> None:
        nonlocal told
        place: tuple[object, ...] = standing.key, standing.number // 10
        if standing.number <= 10:
            place = standing.key, standing.number, standing.behind.place if standing.behind else None
        if place != told:
            context.run(log.info, "Waiting for the lock %r: %s.", standing.key, standing.describe())
            told = place

    return tell


# What a template makes of True and False, by way of Python or of JSON.
_FLAGS = {"True": True, "true": True, "False": False, "false": False}


def _number(name: str, value: Any) -> Any:
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        raise LockValueError(f"{name} must be a number of seconds, not {value!r}.") from None
