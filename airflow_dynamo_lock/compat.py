"""All that differs between Airflow's minor versions, and all that Airflow does not say in a documented way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from airflow import __version__ as _version

if TYPE_CHECKING:
    from airflow.providers.common.compat.sdk import BaseOperator

AIRFLOW_VERSION = tuple(int(part) for part in _version.split(".")[:2])

#: From 3.3 on the scheduler defers a task by itself, the triggerer renders its templates, and the trigger ends it.
STARTS_FROM_TRIGGER = AIRFLOW_VERSION >= (3, 3)


def may_start_from_trigger(operator: BaseOperator, templates: Any) -> bool:
    """Whether `operator` can be deferred by the scheduler, so that it never needs a worker.

    The triggerer renders templates, but without the DAG's own macros and filters, it cannot look up XComs in them, and
    it does not resolve references to other tasks' results or to the arguments of a mapped group. Where one of these is
    needed, the operator starts on a worker, tries once, and defers from there.
    """
    from airflow.sdk.definitions._internal.mixins import ResolveMixin

    dag = operator.get_dag() if operator.has_dag() else None
    return (
        STARTS_FROM_TRIGGER
        and not (dag is not None and (dag.user_defined_macros or dag.user_defined_filters))
        and not any(isinstance(each, ResolveMixin) or "xcom" in str(each) for each in _leaves(templates))
    )


def runs_in_dag_test() -> bool:
    """Whether this process is a ``dag.test()``, which runs all tasks one after the other in one process.

    Nothing can wait there for another task of the same run, and triggers get neither templates nor a task instance.
    """
    from airflow.sdk.execution_time import supervisor, task_runner

    in_process = getattr(supervisor, "InProcessSupervisorComms", None)
    comms = getattr(task_runner, "SUPERVISOR_COMMS", None)
    return in_process is not None and isinstance(comms, in_process)


def is_talking_to_supervisor(frame: Any) -> bool:
    """Whether `frame` is inside a request from a task to its supervisor: interrupted there, the next request would
    read the answer to this one."""
    while frame is not None:
        if frame.f_globals.get("__name__") == "airflow.sdk.execution_time.comms":
            return True
        frame = frame.f_back
    return False


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple, set)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value


@contextmanager
def as_execute(operator: BaseOperator) -> Iterator[None]:
    """Call ``operator.execute`` from a method that resumed the task, without Airflow's warning against calling it by
    hand."""
    from airflow.sdk.bases.operator import ExecutorSafeguard

    token = ExecutorSafeguard.tracker.set(operator)
    try:
        yield
    finally:
        ExecutorSafeguard.tracker.reset(token)
