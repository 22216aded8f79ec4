"""The decorator ``@task.dynamo_lock(key=…)``, which runs a function as a task under a lock."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any

from airflow_dynamo_lock.airflow.locked_function import DynamoLockOperator
from airflow_dynamo_lock.airflow.versions import DecoratedOperator, task_decorator_factory

if TYPE_CHECKING:
    from airflow_dynamo_lock.airflow.versions import TaskDecorator


class _DynamoLockDecoratedOperator(DecoratedOperator, DynamoLockOperator):
    """The operator of a task that ``@task.dynamo_lock`` creates."""

    template_fields = (*DecoratedOperator.template_fields, *DynamoLockOperator.template_fields)
    custom_operator_name = "@task.dynamo_lock"

    def __init__(
        self,
        *,
        python_callable: Callable[..., Any],
        op_args: Collection[Any] | None = None,
        op_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        upstream: dict[str, Any] = {
            "python_callable": python_callable,
            "op_args": op_args,
            "op_kwargs": op_kwargs,
        }
        super().__init__(kwargs_to_upstream=upstream, **upstream, **kwargs)


def dynamo_lock_task(
    python_callable: Callable[..., Any] | None = None,
    multiple_outputs: bool | None = None,
    **kwargs: Any,
) -> TaskDecorator:
    """Make a function a task that holds a lock while the function runs. DAGs use it as ``@task.dynamo_lock``.

    :param python_callable: the function.
    :param multiple_outputs: if the function returns a dictionary, also push each of its values as an XCom of
        its own. Default: whether the function's annotation says that it returns a dictionary.
    :param kwargs: arguments of `DynamoLockOperator`. ``key`` is required.
    :raises LockValueError: an argument is not valid. Raised when a DAG file calls the decorated function.
    """
    return task_decorator_factory(
        python_callable=python_callable,
        multiple_outputs=multiple_outputs,
        decorated_operator_class=_DynamoLockDecoratedOperator,
        **kwargs,
    )
