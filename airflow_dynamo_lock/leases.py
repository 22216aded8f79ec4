"""Between Airflow and the lock: what a task wants, under which name it holds, and its leases as an XCom."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from airflow_dynamo_lock.protocol import limits
from airflow_dynamo_lock.protocol.errors import LockNotHeldError, LockValueError
from airflow_dynamo_lock.protocol.limits import Seconds, seconds
from airflow_dynamo_lock.protocol.model import Lease, LockRecord

if TYPE_CHECKING:
    from airflow_dynamo_lock.client.core import ClaimOptions
    from airflow_dynamo_lock.hooks import LockSettings

OnTimeout = Literal["fail", "skip"]

#: Beats of the keeper in one lease. So many may fail before it is lost.
BEATS_PER_LEASE = 12


@dataclass(frozen=True)
class Wanted:
    """What to acquire, its templates rendered.

    :ivar keys: without repetition, in the author's order.
    :ivar lease: seconds; None for the connection's default.
    :ivar timeout: seconds; None waits without end.
    """

    keys: tuple[str, ...]
    lease: float | None
    timeout: float | None
    slots: int
    capacity: int
    release_grace: float

    @classmethod
    def of(cls, task: Any) -> Wanted:
        """From an operator's or a trigger's attributes of the same names.

        :raises LockValueError: one of them cannot be.
        """
        slots, capacity = _whole("slots", task.slots), _whole("capacity", task.capacity)
        limits.checked_slots(slots, capacity)
        return cls(
            keys=checked_keys(task.key),
            lease=optional_seconds("lease", task.lease),
            timeout=optional_seconds("timeout", task.timeout, zero=True),
            slots=slots,
            capacity=capacity,
            release_grace=seconds("release_grace", _number("release_grace", task.release_grace)),
        )


def checked_keys(key: Any) -> tuple[str, ...]:
    """One or more keys, each one good, none twice."""
    keys = (key,) if isinstance(key, str) else tuple(key) if isinstance(key, (list, tuple, set)) else ()
    if not keys:
        raise LockValueError(f"A lock needs a key, text or a list of texts, not {key!r}.")
    for each in keys:
        limits.checked_key(each)
    if len(set(keys)) < len(keys):
        raise LockValueError(f"The lock keys {list(keys)!r} name a key twice.")
    return keys


def is_template(value: Any) -> bool:
    """Whether an argument is not known before the task runs: a template, or a reference to another task's result."""
    return hasattr(value, "resolve") or "{{" in str(value) or "{%" in str(value)


def optional_seconds(name: str, value: Seconds | str | None, *, zero: bool = False) -> float | None:
    """A duration in seconds from an argument or from what a template rendered to; None stays None."""
    if value is None or value in ("", "None"):
        return None
    return seconds(name, _number(name, value), zero=zero)


def interval(heartbeat: Seconds | str | None, lease_seconds: float) -> float:
    """Seconds between the keeper's beats."""
    beat = optional_seconds("heartbeat", heartbeat)
    return limits.checked_heartbeat(lease_seconds / BEATS_PER_LEASE if beat is None else beat, lease_seconds)


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
    }


def as_result(leases: Sequence[Lease], wanted_keys: Sequence[str], *, many: bool) -> Any:
    """The acquired leases as the task's result: a dictionary for one key, a list of them where a list was asked for."""
    by_key = {lease.key: lease.as_dict() for lease in leases}
    values = [by_key[key] for key in wanted_keys]
    return values if many else values[0]


def from_result(result: Any, acquire_task_id: str) -> list[Lease]:
    """The leases in the result of an acquire task.

    :raises LockNotHeldError: there is none.
    """
    values = [result] if isinstance(result, dict) else result
    if not values:
        raise LockNotHeldError(
            f"The task {acquire_task_id!r} has acquired no lease in this run, so nothing may work under it: "
            "clear it, if somebody marked it as successful by hand."
        )
    return [Lease.from_dict(value) for value in values]


def xcom_of(ti: Any, task_id: str, key: str = "return_value") -> dict[str, Any]:
    """Where an XCom of a task in the same run and map index is; without a key, its result."""
    return {
        "key": key,
        "dag_id": ti.dag_id,
        "run_id": ti.run_id,
        "task_id": task_id,
        "map_index": ti.map_index,
    }


def busy_log(log: Any, key: str) -> Callable[[LockRecord], None]:
    """Tells the task's log who holds the lock that it waits for, once for each holder."""
    told: set[str] = set()

    def tell(record: LockRecord) -> None:
        if not told.issuperset(record.holders):
            log.info("Waiting for the lock %r. %s.", key, record.describe())
        told.clear()
        told.update(record.holders)

    return tell


def _number(name: str, value: Any) -> Any:
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        raise LockValueError(f"{name} must be a number of seconds, not {value!r}.") from None


def _whole(name: str, value: Any) -> int:
    try:
        return int(value) if isinstance(value, str) else value
    except ValueError:
        raise LockValueError(f"{name} must be a whole number, not {value!r}.") from None
