"""The link from a task to the record of its lock, in the AWS console."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

from airflow_dynamo_lock.airflow.versions import BaseOperatorLink, XCom
from airflow_dynamo_lock.core.table.expressions import LOCK_ENTRY

if TYPE_CHECKING:
    from airflow_dynamo_lock.airflow.hooks import LockSettings
    from airflow_dynamo_lock.airflow.versions import BaseOperator


LINK_KEY = "lock_record_link"


def record_url(settings: LockSettings, region: str | None, key: str) -> str | None:
    """Where the AWS console shows the record of a lock; None where the table is not in AWS."""
    if settings.endpoint_url or not region:
        return None
    place = {
        "itemMode": "2",
        "pk": key,
        "sk": LOCK_ENTRY,
        "route": "ROUTE_ITEM_EXPLORER",
        "table": settings.table,
    }
    return f"https://{region}.console.aws.amazon.com/dynamodbv2/home?region={region}#edit-item?{urlencode(place)}"


class LockRecordLink(BaseOperatorLink):
    """Shown on acquire tasks and lock operators, from the moment that they look for the lock.

    Airflow reads a link from an XCom. A task that is deferred, or that ends in the triggerer, has to push that itself.
    """

    name = "Lock record"

    @property
    def xcom_key(self) -> str:
        return LINK_KEY

    def get_link(self, operator: BaseOperator, *, ti_key: Any) -> str:
        """The address, as the task has pushed it."""
        return XCom.get_value(key=self.xcom_key, ti_key=ti_key) or ""
