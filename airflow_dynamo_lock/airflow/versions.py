"""All that differs between Airflow 3.0 and 3.3, and all that Airflow does without documenting it.

The rest of the package imports Airflow's names from here, and asks no version.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn, ParamSpec, TypeVar

import psutil
from airflow import __version__ as _version
from airflow.sdk import BaseOperator as BaseOperator
from airflow.sdk import BaseOperatorLink as BaseOperatorLink
from airflow.sdk import BaseSensorOperator as BaseSensorOperator
from airflow.sdk import Context as Context
from airflow.sdk import TaskGroup as TaskGroup
from airflow.sdk.bases.decorator import DecoratedOperator as DecoratedOperator
from airflow.sdk.bases.decorator import TaskDecorator as TaskDecorator
from airflow.sdk.bases.decorator import task_decorator_factory as task_decorator_factory
from airflow.sdk.definitions.mappedoperator import MappedOperator as MappedOperator
from airflow.sdk.execution_time.xcom import XCom as XCom

if TYPE_CHECKING:
    from airflow.sdk import BaseHook as BaseHook
    from airflow.sdk.configuration import conf as conf
    from airflow.sdk.exceptions import AirflowNotFoundException as AirflowNotFoundException
    from airflow.sdk.exceptions import AirflowSkipException as AirflowSkipException
    from airflow.sdk.exceptions import TaskDeferred as TaskDeferred
    from airflow.sdk.plugins_manager import AirflowPlugin as AirflowPlugin
else:
    try:  # 3.1
        from airflow.sdk import BaseHook
    except ImportError:
        from airflow.hooks.base import BaseHook
    try:  # 3.2
        from airflow.sdk.configuration import conf
        from airflow.sdk.exceptions import AirflowNotFoundException, AirflowSkipException, TaskDeferred
        from airflow.sdk.plugins_manager import AirflowPlugin
    except ImportError:
        from airflow.configuration import conf
        from airflow.exceptions import AirflowNotFoundException, AirflowSkipException, TaskDeferred
        from airflow.plugins_manager import AirflowPlugin

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Hook = TypeVar("_Hook", bound=type[Any])

_VERSION = tuple(int(part) for part in _version.split(".")[:2])

#: Whether the scheduler can defer a task by itself, and whether the triggerer then renders its templates.
STARTS_IN_TRIGGERER = _VERSION not in ((3, 1), (3, 2))
RENDERS_IN_TRIGGERER = _VERSION >= (3, 3)

#: Whether ``airflow dynamo-lock`` exists: earlier versions ignore the commands of a provider.
HAS_PROVIDER_COMMANDS = _VERSION >= (3, 2)

#: Shortest time in seconds from the start of a trigger to the event that resumes its task on a worker, if the task was
#: deferred on a worker as well. The executor reports the end of the deferring process as "success". If the task is
#: queued again before the scheduler has seen that report, the scheduler marks the resumed task as failed while it runs
#: (apache/airflow issues 66374, 67287, 71580 and 72716; open in 3.3.2).
RESUME_AFTER = 12.0


def may_start_from_trigger(operator: BaseOperator, arguments: Any) -> bool:
    """Whether the scheduler can defer `operator` by itself, so that waiting needs no worker.

    Airflow 3.3 renders templates in the triggerer, but without the DAG's own macros and filters and without XComs, and
    it resolves no references to the results of other tasks or to the arguments of a mapped group. Airflow 3.0 renders
    nothing there. Where `arguments` need more, the operator starts on a worker, tries once, and defers from there.

    :param arguments: the arguments of the trigger.
    """
    from airflow.sdk.definitions._internal.mixins import ResolveMixin

    if not STARTS_IN_TRIGGERER:
        return False
    leaves = list(_leaves(arguments))
    if not RENDERS_IN_TRIGGERER:
        return not any(
            isinstance(each, ResolveMixin) or "{{" in str(each) or "{%" in str(each) for each in leaves
        )
    dag = operator.get_dag() if operator.has_dag() else None
    has_macros = dag is not None and (dag.user_defined_macros or dag.user_defined_filters)
    return not has_macros and not any(
        isinstance(each, ResolveMixin) or "xcom" in str(each) for each in leaves
    )


async def in_thread(call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Call a blocking function of Airflow's from the event loop of a triggerer, in a thread.

    ``XCom.set``, ``XCom.get_one`` and ``BaseHook.get_connection`` work this way in every version; their asynchronous
    forms came with 3.1 to 3.3. The call outlasts a cancellation: before 3.3 a request to the triggerer's supervisor
    that is cut off leaves its answer to the next request, of whatever trigger, which then fails.
    """
    from asgiref.sync import sync_to_async

    # Not thread-sensitive: that one thread is shared with all other triggers, which may block it.
    calling = asyncio.ensure_future(sync_to_async(call, thread_sensitive=False)(*args, **kwargs))
    return await asyncio.shield(calling)


def with_connection_form(
    fields: Mapping[str, tuple[str, str, str]], hidden: list[str]
) -> Callable[[_Hook], _Hook]:
    """A decorator that gives a hook the form of its connection in Airflow before 3.2, which does not read
    ``conn-fields``. Airflow looks for these methods in the hook's own class, and drops forms with other kinds of field.

    :param fields: name → label, type and description, as in `provider_info`.
    :param hidden: the standard fields that the form does not show.
    """

    def get_connection_form_widgets() -> dict[str, Any]:
        # Airflow 3.0 has this library from its FAB provider. Without it, the form shows the extra as JSON.
        from wtforms import BooleanField, StringField

        return {
            name: (BooleanField if kind == "boolean" else StringField)(label, description=description)
            for name, (label, kind, description) in fields.items()
        }

    def get_ui_field_behaviour() -> dict[str, Any]:
        return {"hidden_fields": hidden, "relabeling": {}, "placeholders": {}}

    def add(hook: _Hook) -> _Hook:
        if _VERSION < (3, 2):
            hook.get_connection_form_widgets = staticmethod(get_connection_form_widgets)
            hook.get_ui_field_behaviour = staticmethod(get_ui_field_behaviour)
        return hook

    return add


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


def running_task() -> FrameType | None:
    """The frame of Airflow's task runner from which the code of a task was called that calls this. None outside of
    Airflow."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "airflow.sdk.execution_time.task_runner":
        frame = frame.f_back
    return frame


def has_ended(frame: FrameType) -> bool:
    """Whether a function has returned, or raised: then its frame can be cleared. From any thread."""
    try:
        frame.clear()
    except RuntimeError:
        return False
    return True


def end_process() -> NoReturn:
    """End this process and its children at once. Airflow fails the task, or retries it.

    By process id, not by process group: before Airflow 3.3 a task is in the group of its supervisor.
    """
    try:
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
    finally:
        os._exit(1)  # not SIGKILL, which Airflow takes for a lack of memory


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


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple, set)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value
