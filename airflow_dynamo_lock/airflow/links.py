"""The links of a task: to its lock on the Locks page, and to its lock's record in the AWS console."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode, urlparse

from airflow_dynamo_lock.airflow.lock_options import is_template
from airflow_dynamo_lock.airflow.versions import BaseOperatorLink, XCom, conf
from airflow_dynamo_lock.core.table.expressions import LOCK_ENTRY

if TYPE_CHECKING:
    from airflow_dynamo_lock.airflow.settings import LockSettings
    from airflow_dynamo_lock.airflow.versions import BaseOperator

#: Key of the XCom that contains the link's address.
LINK_KEY = "lock_record_link"


def record_url(settings: LockSettings, region: str | None, key: str) -> str | None:
    """Return the address of a lock's record in the AWS console, or None if the table is not in AWS.

    :param settings: the connection's settings. If they have an ``endpoint_url``, the table is not in AWS.
    :param region: the table's AWS region, or None if it is unknown.
    :param key: the lock.
    """
    if settings.endpoint_url or not region:
        return None
    arguments = {
        "itemMode": "2",
        "pk": key,
        "sk": LOCK_ENTRY,
        "route": "ROUTE_ITEM_EXPLORER",
        "table": settings.table,
    }
    page = f"https://{region}.console.aws.amazon.com/dynamodbv2/home?region={region}#edit-item"
    return f"{page}?{urlencode(arguments)}"


class LockRecordLink(BaseOperatorLink):
    """The link *Lock record*, which Airflow shows on acquire tasks and lock operators once they have started.

    Airflow reads the address from an XCom. It pushes that XCom only when a task ends on a worker, so
    operators and triggers push it themselves before they wait.
    """

    name = "Lock record"

    @property
    def xcom_key(self) -> str:
        """Key of the XCom from which Airflow reads the address."""
        return LINK_KEY

    def get_link(self, operator: BaseOperator, *, ti_key: Any) -> str:
        """Return the address that the task has pushed, or an empty string if it has pushed none."""
        return XCom.get_value(key=self.xcom_key, ti_key=ti_key) or ""


def base_path() -> str:
    """The path of the web interface, without a slash at its end: that of ``[api] base_url``."""
    return urlparse(conf.get("api", "base_url", fallback="") or "").path.rstrip("/")


def _named(module: str, name: str) -> Any:
    """A class as Airflow looks for it: by its name and module. The class itself is not loaded."""
    return SimpleNamespace(__module__=f"airflow_dynamo_lock.airflow.{module}", __name__=name)


class LocksPageLink(BaseOperatorLink):
    """The link *Lock*, to the lock on the Locks page.

    The plugin registers it, so the API server computes the address when somebody looks at the task, also while the
    task waits.
    """

    name = "Lock"
    operators = [  # noqa: RUF012 - Airflow's declaration
        _named("operators", "DynamoLockAcquireOperator"),
        _named("locked_function", "DynamoLockOperator"),
        _named("decorators", "_DynamoLockDecoratedOperator"),
    ]

    def get_link(self, operator: BaseOperator, *, ti_key: Any) -> str:
        """Return the address of the task's lock. If the DAG does not have its name, search for the run instead."""
        key, conn_id = getattr(operator, "key", None), getattr(operator, "dynamo_lock_conn_id", None)
        if isinstance(key, (list, tuple)) and key:
            key = key[0]
        wanted = {"conn": conn_id} if _is_known(conn_id) else {}
        wanted |= {"key": key} if _is_known(key) else {"search": ti_key.run_id}
        return f"{base_path()}/plugin/locks?{urlencode(wanted)}"


def _is_known(value: Any) -> bool:
    return isinstance(value, str) and not is_template(value)
