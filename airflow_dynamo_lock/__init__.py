"""Locks that Airflow deployments share through a DynamoDB table.

Names are loaded when they are used: a DAG file that imports `DynamoLock` loads no AWS SDK, and a script that imports
`LockClient` loads no Airflow.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_HOMES = {
    "AsyncLockClient": "client.aio",
    "CapacityMismatchError": "protocol.errors",
    "DynamoLock": "task_group",
    "DynamoLockAcquireOperator": "operators",
    "DynamoLockHeartbeatOperator": "operators",
    "DynamoLockHook": "hooks",
    "DynamoLockOperator": "operators",
    "DynamoLockReleaseOperator": "operators",
    "DynamoLockSensor": "sensors",
    "Lease": "protocol.model",
    "LeaseSet": "protocol.model",
    "LockAccessError": "protocol.errors",
    "LockClient": "client.sync",
    "LockError": "protocol.errors",
    "LockLostError": "protocol.errors",
    "LockNotFoundError": "protocol.errors",
    "LockNotHeldError": "protocol.errors",
    "LockRecord": "protocol.model",
    "LockRecordError": "protocol.errors",
    "LockTableError": "protocol.errors",
    "LockTimeoutError": "protocol.errors",
    "LockUnavailableError": "protocol.errors",
    "LockValueError": "protocol.errors",
    "Standing": "protocol.model",
    "Waiter": "protocol.model",
    "sdk_config": "client.wire",
}

__all__ = sorted(_HOMES)

if TYPE_CHECKING:
    from airflow_dynamo_lock.client.aio import AsyncLockClient as AsyncLockClient
    from airflow_dynamo_lock.client.sync import LockClient as LockClient
    from airflow_dynamo_lock.client.wire import sdk_config as sdk_config
    from airflow_dynamo_lock.hooks import DynamoLockHook as DynamoLockHook
    from airflow_dynamo_lock.operators import (
        DynamoLockAcquireOperator as DynamoLockAcquireOperator,
    )
    from airflow_dynamo_lock.operators import (
        DynamoLockHeartbeatOperator as DynamoLockHeartbeatOperator,
    )
    from airflow_dynamo_lock.operators import (
        DynamoLockOperator as DynamoLockOperator,
    )
    from airflow_dynamo_lock.operators import (
        DynamoLockReleaseOperator as DynamoLockReleaseOperator,
    )
    from airflow_dynamo_lock.protocol.errors import (
        CapacityMismatchError as CapacityMismatchError,
    )
    from airflow_dynamo_lock.protocol.errors import (
        LockAccessError as LockAccessError,
    )
    from airflow_dynamo_lock.protocol.errors import (
        LockError as LockError,
    )
    from airflow_dynamo_lock.protocol.errors import (
        LockLostError as LockLostError,
    )
    from airflow_dynamo_lock.protocol.errors import (
        LockNotFoundError as LockNotFoundError,
    )
    from airflow_dynamo_lock.protocol.errors import (
        LockNotHeldError as LockNotHeldError,
    )
    from airflow_dynamo_lock.protocol.errors import (
        LockRecordError as LockRecordError,
    )
    from airflow_dynamo_lock.protocol.errors import (
        LockTableError as LockTableError,
    )
    from airflow_dynamo_lock.protocol.errors import (
        LockTimeoutError as LockTimeoutError,
    )
    from airflow_dynamo_lock.protocol.errors import (
        LockUnavailableError as LockUnavailableError,
    )
    from airflow_dynamo_lock.protocol.errors import (
        LockValueError as LockValueError,
    )
    from airflow_dynamo_lock.protocol.model import Lease as Lease
    from airflow_dynamo_lock.protocol.model import LeaseSet as LeaseSet
    from airflow_dynamo_lock.protocol.model import LockRecord as LockRecord
    from airflow_dynamo_lock.protocol.model import Standing as Standing
    from airflow_dynamo_lock.protocol.model import Waiter as Waiter
    from airflow_dynamo_lock.sensors import DynamoLockSensor as DynamoLockSensor
    from airflow_dynamo_lock.task_group import DynamoLock as DynamoLock


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOMES})
