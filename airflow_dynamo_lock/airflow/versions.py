"""Differences between Airflow 3.0 and 3.3, and uses of Airflow's undocumented internals.

The other modules import from here the names that Airflow has moved between versions, and never compare
versions themselves.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
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

from airflow_dynamo_lock.log import log

if TYPE_CHECKING:
    from airflow.sdk import BaseHook as BaseHook
    from airflow.sdk.configuration import conf as conf
    from airflow.sdk.exceptions import AirflowFailException as AirflowFailException
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
        from airflow.sdk.exceptions import (
            AirflowFailException,
            AirflowNotFoundException,
            AirflowSkipException,
            TaskDeferred,
        )
        from airflow.sdk.plugins_manager import AirflowPlugin
    except ImportError:
        from airflow.configuration import conf
        from airflow.exceptions import (
            AirflowFailException,
            AirflowNotFoundException,
            AirflowSkipException,
            TaskDeferred,
        )
        from airflow.plugins_manager import AirflowPlugin

_P = ParamSpec("_P")
_T = TypeVar("_T")
_Hook = TypeVar("_Hook", bound=type[Any])

_VERSION = tuple(int(part) for part in _version.split(".")[:2])

#: Whether the scheduler can defer a task by itself, so that it starts in the triggerer and not on a worker. Airflow 3.1
#: and 3.2 have the attribute `start_from_trigger`, and ignore it.
STARTS_IN_TRIGGERER = _VERSION not in ((3, 1), (3, 2))

#: Whether the triggerer renders the templates of a task that starts there.
RENDERS_IN_TRIGGERER = _VERSION >= (3, 3)

#: Whether Airflow may retry a task that its trigger has ended as failed (3.3.1, apache/airflow pull request 71163).
#: Earlier versions fail such a task for good. Where 3.3.0 is taken for a later one, that costs a worker only.
RETRIES_AFTER_TRIGGER = _VERSION >= (3, 3)

#: Whether the command ``airflow dynamo-lock`` exists. Earlier versions ignore the commands of providers.
HAS_PROVIDER_COMMANDS = _VERSION >= (3, 2)

#: Whether plugins may add pages to the web interface.
HAS_PAGES = _VERSION >= (3, 1)

#: Minimum time in seconds from the start of a trigger to the event that resumes its task on a worker, if the
#: task was deferred on a worker. The executor reports the end of the deferring process as "success". If the
#: task is queued again before the scheduler has read that report, the scheduler marks the resumed task as
#: failed while it runs (apache/airflow issues 66374, 67287, 71580 and 72716; open in 3.3.2).
RESUME_AFTER = 12.0


@cache
def stats() -> Any:
    """Airflow's metrics. They are loaded at the first call, because the parsing of DAGs does not need them."""
    try:  # 3.2
        from airflow.sdk.observability.stats import Stats
    except ImportError:
        from airflow.stats import Stats
    return Stats


def can_start_from_trigger(operator: BaseOperator, arguments: Any) -> bool:
    """Whether the scheduler can defer `operator` by itself, so that waiting needs no worker.

    The triggerer of Airflow 3.0 renders no templates. That of Airflow 3.3 renders them without the DAG's own
    macros, filters and settings of Jinja, and without XComs. No triggerer resolves references to the results of
    other tasks, or to the arguments of a mapped task group. If `arguments` need any of these, the operator has to
    start on a worker.

    :param operator: the operator, with its DAG if it has one.
    :param arguments: the arguments of its trigger.
    """
    from airflow.sdk.definitions._internal.mixins import ResolveMixin

    if not STARTS_IN_TRIGGERER:
        return False
    values = list(_leaves(arguments))
    if any(isinstance(value, ResolveMixin) for value in values):
        return False
    templates = [text for text in map(str, values) if "{{" in text or "{%" in text]
    if not templates or not RENDERS_IN_TRIGGERER:
        return not templates
    if operator.has_dag() and _has_own_jinja(operator.get_dag()):
        return False
    return not any("xcom" in text for text in templates)


def _has_own_jinja(dag: Any) -> bool:
    """Whether a DAG renders its templates in another way than `LockTrigger` does."""
    from jinja2 import StrictUndefined

    return bool(
        dag.user_defined_macros
        or dag.user_defined_filters
        or dag.render_template_as_native_obj
        or dag.jinja_environment_kwargs
        or dag.template_undefined is not StrictUndefined
    )


def why_not_found(conn_id: str) -> str | None:
    """Why Airflow has not found a connection, if it could not look everywhere. None: there is no such connection.

    Airflow goes on after each error of a secrets backend, and takes most errors of its API server for a missing
    connection.
    """
    from airflow.sdk.execution_time import comms, supervisor, task_runner

    for backend in supervisor.ensure_secrets_backend_loaded():
        try:
            found = backend.get_connection(conn_id=conn_id)
        except NotImplementedError:  # this backend has no connections
            continue
        except Exception as failure:  # its text may contain the connection
            return f"{type(backend).__name__}: {type(failure).__name__}"
        if found is not None:
            return f"{type(backend).__name__} has answered the second request only"
    requests = getattr(task_runner, "SUPERVISOR_COMMS", None)
    if requests is None:  # not in a process that asks the API server
        return None
    answer: Any = requests.send(comms.GetConnection(conn_id=conn_id))
    if not isinstance(answer, comms.ErrorResponse):
        return "the API server has answered the second request only"
    return None if answer.error.name == "CONNECTION_NOT_FOUND" else f"API server: {answer.error.value}"


def run_hook(hook: Callable[[Any], Any], context: Any) -> None:
    """Call a task's ``pre_execute`` as Airflow does, which also supports generator functions that yield metadata."""
    from airflow.sdk.execution_time.callback_runner import create_executable_runner
    from airflow.sdk.execution_time.context import context_get_outlet_events

    create_executable_runner(hook, context_get_outlet_events(context), logger=log).run(context)


def notifies_async(notifier: Any) -> bool:
    """Whether a notifier can be awaited. Airflow 3.1 added that, and each notifier decides whether to support it."""
    from airflow.sdk import BaseNotifier

    own, inherited = (getattr(kind, "async_notify", None) for kind in (type(notifier), BaseNotifier))
    return inherited is not None and own is not inherited


async def in_thread(call: Callable[_P, _T], *args: _P.args, **kwargs: _P.kwargs) -> _T:
    """Run a blocking function of Airflow in a thread, and await its result in the event loop of a triggerer.

    ``XCom.set``, ``XCom.get_one`` and ``BaseHook.get_connection`` can be called like this in every version.
    Airflow added their asynchronous forms in 3.1 to 3.3.

    If the caller is cancelled, the call itself continues. Before Airflow 3.3, a request to the triggerer's
    supervisor that is cancelled leaves its answer unread, and the next request of any trigger reads it and
    fails.
    """
    from asgiref.sync import sync_to_async

    # With thread_sensitive=True, all triggers share one thread, and a blocked call delays the others.
    calling = asyncio.ensure_future(sync_to_async(call, thread_sensitive=False)(*args, **kwargs))
    return await asyncio.shield(calling)


def with_connection_form(
    fields: Mapping[str, tuple[str, str, str]], hidden: list[str]
) -> Callable[[_Hook], _Hook]:
    """Return a class decorator that adds the connection form to a hook, on Airflow before 3.2.

    Airflow 3.2 and later read the form from ``conn-fields`` in the provider's description. Earlier versions
    call two methods of the hook's own class, not of a base class. They drop a form that has fields of other
    types than text and boolean.

    :param fields: name → label, type and description, as in `provider_info.FIELDS`.
    :param hidden: names of the standard fields that the form does not show.
    """

    def get_connection_form_widgets() -> dict[str, Any]:
        # Airflow 3.0 gets this library from its FAB provider. Without it, the form shows the extra as JSON.
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
    """Whether this process runs ``dag.test()``, which runs all tasks in one process, one after the other.

    There, a task that waits for another task of the same run never ends, and triggers get neither rendered
    templates nor a task instance.
    """
    from airflow.sdk.execution_time import supervisor, task_runner

    in_process = getattr(supervisor, "InProcessSupervisorComms", None)
    comms = getattr(task_runner, "SUPERVISOR_COMMS", None)
    return in_process is not None and isinstance(comms, in_process)


def skip_task(task_id: str, map_index: int) -> None:
    """Set another task of the run to skipped, from a task's process.

    If it runs or has ended, it stays as it is from Airflow 3.2 on; before, it is set to skipped too.

    :param task_id: id of the other task.
    :param map_index: its map index; -1 if it is not mapped.
    """
    from airflow.sdk.execution_time import comms, task_runner

    task_runner.SUPERVISOR_COMMS.send(comms.SkipDownstreamTasks(tasks=[(task_id, map_index)]))


def is_talking_to_supervisor(frame: Any) -> bool:
    """Whether `frame` is part of a request from a task to its supervisor.

    Such a request must not be interrupted: the next request would read its answer.
    """
    while frame is not None:
        if frame.f_globals.get("__name__") == "airflow.sdk.execution_time.comms":
            return True
        frame = frame.f_back
    return False


def task_runner_frame() -> FrameType | None:
    """Return the frame of Airflow's task runner that called the code of the current task.

    :returns: None if this thread runs no Airflow task.
    """
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_globals.get("__name__") != "airflow.sdk.execution_time.task_runner":
        frame = frame.f_back
    return frame


def has_ended(frame: FrameType) -> bool:
    """Whether the function that runs in `frame` has returned or raised. May be called from any thread.

    Clears the local variables of the frame if it has ended.
    """
    # Python refuses to clear the frame of a function that still runs.
    try:
        frame.clear()
    except RuntimeError:
        return False
    return True


def end_process() -> NoReturn:
    """Kill all child processes, and exit this process at once. Airflow fails or retries the task.

    The children are killed by process id, not by process group, because before Airflow 3.3 a task is in the
    process group of its supervisor.
    """
    try:
        for child in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                child.kill()
    finally:
        os._exit(1)  # Airflow would report a SIGKILL as lack of memory


@contextmanager
def as_execute(operator: BaseOperator) -> Iterator[None]:
    """Allow ``operator.execute`` to be called inside the ``with`` block.

    Airflow calls another method when it resumes a deferred task, and warns if that method calls ``execute``.
    """
    from airflow.sdk.bases.operator import ExecutorSafeguard

    token = ExecutorSafeguard.tracker.set(operator)
    try:
        yield
    finally:
        ExecutorSafeguard.tracker.reset(token)


def _leaves(value: Any) -> Iterator[Any]:
    """Iterate over the values in nested dictionaries, lists, tuples and sets."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (list, tuple, set)):
        for each in value:
            yield from _leaves(each)
    else:
        yield value
