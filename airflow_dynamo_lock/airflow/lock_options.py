"""What Airflow's tasks and the lock exchange: the options of a task, the name of the holder, leases as XComs."""

from __future__ import annotations

import os
import re
from ast import literal_eval
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import copy_context
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, get_type_hints

from airflow_dynamo_lock.airflow.versions import AirflowFailException
from airflow_dynamo_lock.core.model import arguments
from airflow_dynamo_lock.core.model.arguments import Seconds, seconds
from airflow_dynamo_lock.core.model.claim import LockSpec
from airflow_dynamo_lock.core.model.errors import LockError, LockNotHeldError, LockValueError
from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet
from airflow_dynamo_lock.core.model.limits import MAX_ID_BYTES, RELEASE_GRACE
from airflow_dynamo_lock.core.model.record import LockRecord, QueuePosition
from airflow_dynamo_lock.core.model.text import shown

if TYPE_CHECKING:
    from airflow_dynamo_lock.airflow.settings import LockSettings
    from airflow_dynamo_lock.client.options import ClaimOptions
    from airflow_dynamo_lock.core.model.claim import Mode

OnTimeout = Literal["fail", "skip"]

#: Number of heartbeats of the heartbeat task per lease.
HEARTBEATS_PER_LEASE = 12

#: The XCom of a `DynamoLockOperator` task that has its leases, for the Locks page. Its result is that of its function.
LEASES_KEY = "dynamo_lock_leases"

#: What a task that acquires a lock may claim, with the defaults: the parameters that may be templates, besides the
#: connection. `DynamoLockAcquireOperator` documents them.
PARAMETERS: Mapping[str, Any] = {
    "key": None,
    "timeout": None,
    **asdict(LockSpec()),
    "release_grace": RELEASE_GRACE,
}
# Attribute of the event of `fail_for_good`. No lease has it.
_FAILURE = "failure"
# These are checked together.
_SLOTS = {"slots", "capacity", "mode"}


@dataclass(frozen=True)
class Wanted:
    """What a task acquires, its templates rendered.

    :ivar keys: the locks, without repetition, in the author's order.
    :ivar timeout: maximum time to wait, seconds; None waits without a limit.
    :ivar spec: the options of the locks.
    """

    keys: tuple[str, ...]
    timeout: float | None
    spec: LockSpec

    @classmethod
    def of(cls, task: Any) -> Wanted:
        """Read the attributes of an operator or a trigger that `PARAMETERS` names.

        :raises LockValueError: an attribute is not valid.
        """
        return cls._of({name: getattr(task, name) for name in PARAMETERS})

    @classmethod
    def check_early(cls, operator: Any) -> None:
        """Check the attributes that are not templates, when the DAG is parsed.

        :raises LockValueError: an attribute is not valid.
        """
        given = {name: getattr(operator, name) for name in PARAMETERS}
        unknown = {name for name, value in given.items() if is_template(value)}
        if unknown & _SLOTS:
            unknown |= _SLOTS
        known = {name: value for name, value in given.items() if name not in unknown}
        cls._of({**PARAMETERS, "key": "not known yet", **known})

    @classmethod
    def _of(cls, given: Mapping[str, Any]) -> Wanted:
        return cls(
            keys=checked_keys(given["key"]),
            timeout=optional_seconds("timeout", given["timeout"], zero=True),
            spec=LockSpec.of({name: _parsed(name, given[name], kind) for name, kind in _KINDS.items()}),
        )


def checked_keys(key: Any) -> tuple[str, ...]:
    """The keys of a task: one, or up to 100, each valid and given once."""
    if isinstance(key, set):
        key = sorted(key, key=str)
    keys = arguments.checked_keys([key] if isinstance(key, str) else key)
    for each in keys:
        _check_rendered(each, "use a list of templates, or render_template_as_native_obj=True in the DAG")
    return keys


def checked_key(key: str) -> str:
    """The key of a sensor."""
    key = arguments.checked_key(key)
    _check_rendered(key, "use a sensor for each key")
    return key


def checked_look(slots: Any, lock_mode: Any) -> tuple[int, Mode]:
    """The slots that a sensor waits for, and its ``lock_mode``.

    :raises LockValueError: one of them is not valid.
    """
    if lock_mode not in ("shared", "exclusive"):
        raise LockValueError(f"lock_mode must be 'shared' or 'exclusive', not {shown(lock_mode)}.")
    slots = whole("slots", slots)
    arguments.checked_slots(slots, slots)
    if lock_mode == "shared" and slots != 1:
        raise LockValueError(
            f"A shared lock has no slots to count, so a sensor cannot wait for {slots} of them in shared mode: "
            "leave slots or lock_mode out."
        )
    return slots, lock_mode


# What an f-string makes of an argument of a mapped task group, or of another reference.
_OBJECT = re.compile(r"\b(?:MappedArgument|\w*XComArg)\(|<airflow\.[\w.]+ object at 0x")


def _check_rendered(key: str, for_several: str) -> None:
    """Refuse the text that Python makes of a value that is no key.

    :param for_several: what to do instead if several keys are meant.
    :raises LockValueError: the key is None, blank or a list as text.
    """
    if key == "None" or not key.strip():
        raise LockValueError(
            f"A lock's key has rendered to {shown(key)}, which names no resource: correct the template."
        )
    if _OBJECT.search(key):
        raise LockValueError(
            f"A lock's key contains the text of an object of Airflow ({shown(key)}), so it names no resource: pass the "
            "argument itself as the key, or build the keys in a task."
        )
    if key.startswith(("[", "(", "{")):
        try:
            is_list = isinstance(literal_eval(key), (list, tuple, set))
        except (SyntaxError, TypeError, ValueError, MemoryError, RecursionError):
            return
        if is_list:
            raise LockValueError(
                f"A lock's key has rendered to the text {shown(key)}, not to a list: {for_several}."
            )


def check_id(name: str, value: Any, of: str) -> None:
    """Check a parameter that is an id, when the DAG is parsed.

    :param name: name of the parameter.
    :param of: what it identifies.
    :raises LockValueError: it is no text, or blank.
    """
    if not isinstance(value, str) or not value.strip():
        raise LockValueError(f"{name} must be the id of {of}, not {shown(value)}.")


def check_conn_id(value: Any) -> None:
    """Check ``dynamo_lock_conn_id`` when the DAG is parsed, unless it is a template. Raises as `check_id`."""
    if not is_template(value):
        check_id("dynamo_lock_conn_id", value, "a connection")


def is_template(value: Any) -> bool:
    """Whether the value is known only when the task runs: a template, or a reference to another task's result."""
    is_reference = hasattr(value, "resolve") and not isinstance(value, os.PathLike)
    return is_reference or "{{" in str(value) or "{%" in str(value)


def optional_seconds(name: str, value: Seconds | str | None, *, zero: bool = False) -> float | None:
    """A duration in seconds from an argument or from what a template rendered to; None stays None."""
    if value is None or value in ("", "None"):
        return None
    return seconds(name, _number(name, value), zero=zero)


def whole(name: str, value: Any) -> Any:
    """The whole number that a text is; any other value unchanged.

    :raises LockValueError: the text is not a whole number.
    """
    try:
        return int(value) if isinstance(value, str) else value
    except ValueError:
        raise LockValueError(f"{name} must be a whole number, not {shown(value)}.") from None


def interval(heartbeat: Seconds | str | None, lease_seconds: float) -> float:
    """The interval of the heartbeat task, in seconds.

    :param heartbeat: the interval, as the author of the DAG gave it; None for the default.
    :param lease_seconds: length of the lease.
    :raises LockValueError: the lease is shorter than two intervals.
    """
    seconds_between = optional_seconds("heartbeat", heartbeat)
    return arguments.checked_heartbeat(
        lease_seconds / HEARTBEATS_PER_LEASE if seconds_between is None else seconds_between, lease_seconds
    )


def plain(value: Any) -> Any:
    """A duration as an argument of a trigger: seconds, or a template."""
    return value.total_seconds() if hasattr(value, "total_seconds") else value


def claim_options(ti: Any, settings: LockSettings, wanted: Wanted) -> ClaimOptions:
    """The options of the claim of a task instance. Its id is the lease id (R7), and its name is the owner."""
    where = f"{ti.dag_id}/{ti.run_id}/{ti.task_id}" + (f"[{ti.map_index}]" if ti.map_index >= 0 else "")
    return {
        "lease_id": str(ti.id),
        # Ids of Airflow have up to 250 characters each, so the name may be too long.
        "owner": f"{settings.deployment}/{where}".encode()[:MAX_ID_BYTES].decode(errors="ignore"),
        # The id of the DAG version tells apart deployments that have the same name.
        "attempt_of": f"{getattr(ti, 'dag_version_id', None)}/{where}",
        "about": about(ti, settings.deployment),
        **asdict(wanted.spec),  # type: ignore[typeddict-item]
    }


def about(ti: Any, deployment: str) -> dict[str, str]:
    """What a record says of a task instance that waits for a lock or holds it. The Locks page makes links of it."""
    return {
        "deployment": deployment,
        "dag_id": ti.dag_id,
        "run_id": ti.run_id,
        "task_id": ti.task_id,
        "map_index": str(ti.map_index),
        "try_number": str(ti.try_number),
    }


def as_result(leases: Iterable[Lease], wanted_keys: Sequence[str], *, many: bool) -> Any:
    """The result of a task that has acquired leases: a dictionary, or a list of them if the key was a list."""
    by_key = {lease.key: lease.as_dict() for lease in leases}
    values = [by_key[key] for key in wanted_keys]
    return values if many else values[0]


def from_result(result: Any, acquire_task_id: str) -> LeaseSet:
    """The leases in the result of an acquire task.

    :raises LockNotHeldError: the task has no result.
    """
    values = [result] if isinstance(result, dict) else result
    if not values:
        raise LockNotHeldError(
            f"The task {acquire_task_id!r} has acquired no lease in this run, so nothing may work under it: "
            "clear it, if it was marked as successful by hand."
        )
    return LeaseSet(tuple(Lease.from_dict(value) for value in values))


def fail_for_good(failure: LockError) -> dict[str, str]:
    """The payload of the event with which a trigger fails its task without a retry."""
    return {_FAILURE: str(failure)}


def checked_event(event: Any) -> Any:
    """Return the payload of a trigger's event, on the worker that resumes the task.

    :raises AirflowFailException: the payload is that of `fail_for_good`.
    """
    if isinstance(event, dict) and _FAILURE in event:
        raise AirflowFailException(event[_FAILURE])
    return event


def xcom_arguments(
    ti: Any, task_id: str, key: str = "return_value", *, mapped: bool = True
) -> dict[str, Any]:
    """The arguments of `XCom` for a task in the same run.

    :param key: key of the XCom; by default that of the task's result.
    :param mapped: whether the task has the map index of `ti`; else it has none.
    """
    return {
        "key": key,
        "dag_id": ti.dag_id,
        "run_id": ti.run_id,
        "task_id": task_id,
        "map_index": ti.map_index if mapped else -1,
    }


def holder_log(log: Any) -> Callable[[LockRecord], None]:
    """A callback that logs the holders of the lock that a task waits for, once per change."""
    logged: set[str] = set()

    def on_busy(record: LockRecord) -> None:
        if not logged.issuperset(record.holders):
            log.info("Waiting for the lock %r. %s.", record.key, record.describe())
        logged.clear()
        logged.update(record.holders)

    return on_busy


def position_log(log: Any) -> Callable[[QueuePosition], None]:
    """A callback that logs the task's position in the queue, once per change. Beyond position 10, it logs only one line
    per ten positions, because hundreds of waiters may move up at the same moment.

    The poller calls it, which all waiters of the process share. Airflow finds the log of a task by the context, so each
    line is written in the context of its task.
    """
    context = copy_context()
    logged: tuple[object, ...] | None = None

    def on_position(position: QueuePosition) -> None:
        nonlocal logged
        now: tuple[object, ...] = position.key, position.number // 10
        if position.number <= 10:
            now = position.key, position.number, position.behind.place if position.behind else None
        if now != logged:
            context.run(log.info, "Waiting for the lock %r: %s.", position.key, position.describe())
            logged = now

    return on_position


# The type of each option of a lock.
_KINDS = get_type_hints(LockSpec)
# What templates render True and False to, by way of Python or of JSON.
_FLAGS = {"True": True, "true": True, "False": False, "false": False}


def _parsed(name: str, value: Any, kind: Any) -> Any:
    """The value of an option of that type, which may be text because a template rendered to it.

    :raises LockValueError: the text is not of that type.
    """
    if not isinstance(value, str):
        return value
    if kind == float | None:
        return None if value in ("", "None") else _number(name, value)
    if kind is bool:
        return _FLAGS.get(value, value)
    return whole(name, value) if kind is int else value


def _number(name: str, value: Any) -> Any:
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        raise LockValueError(f"{name} must be a number of seconds, not {shown(value)}.") from None
