"""Locks that Airflow deployments share through a DynamoDB table.

The package imports a module when a name from it is first used. So a DAG file that imports `DynamoLock` does
not import an AWS SDK, and a script that imports `LockClient` does not import Airflow.
"""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public names, and the modules that define them. The imports below repeat them for type checkers.
_MODULES = {
    "AsyncLockClient": "client.async_client",
    "CapacityMismatchError": "core.model.errors",
    "Decision": "core.model.decisions",
    "Draining": "core.model.outcomes",
    "DynamoLock": "airflow.task_group",
    "DynamoLockAcquireOperator": "airflow.operators",
    "DynamoLockHeartbeatOperator": "airflow.operators",
    "DynamoLockHook": "airflow.hooks",
    "DynamoLockOperator": "airflow.locked_function",
    "DynamoLockReleaseOperator": "airflow.operators",
    "DynamoLockSensor": "airflow.sensors",
    "Holder": "core.model.record",
    "KeepAlive": "client.threads",
    "Kind": "core.model.kind",
    "Lease": "core.model.lease",
    "LeaseSet": "core.model.lease",
    "LockAccessError": "core.model.errors",
    "LockAlert": "airflow.alerts",
    "LockClient": "client.sync_client",
    "LockDeadlockError": "core.model.errors",
    "LockError": "core.model.errors",
    "LockEvent": "events",
    "LockLostError": "core.model.errors",
    "LockNotFoundError": "core.model.errors",
    "LockNotHeldError": "core.model.errors",
    "LockNotWaitingError": "core.model.errors",
    "LockRecord": "core.model.record",
    "LockRecordError": "core.model.errors",
    "LockRemovedError": "core.model.errors",
    "LockSettings": "airflow.settings",
    "LockState": "core.model.state",
    "LockTableError": "core.model.errors",
    "LockTimeoutError": "core.model.errors",
    "LockUnavailableError": "core.model.errors",
    "LockValueError": "core.model.errors",
    "LockVersionError": "core.model.errors",
    "Loss": "core.model.decisions",
    "Lost": "core.model.outcomes",
    "QueuePosition": "core.model.record",
    "Released": "core.model.outcomes",
    "Removal": "core.model.decisions",
    "Renewed": "core.model.outcomes",
    "StillHeld": "core.model.outcomes",
    "Waiter": "core.model.record",
    "sdk_config": "client.sdk",
    "subscribe": "events",
    "unsubscribe": "events",
}

__all__ = sorted(_MODULES)

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

    from airflow_dynamo_lock.airflow.alerts import LockAlert as LockAlert
    from airflow_dynamo_lock.airflow.hooks import DynamoLockHook as DynamoLockHook
    from airflow_dynamo_lock.airflow.locked_function import DynamoLockOperator as DynamoLockOperator
    from airflow_dynamo_lock.airflow.operators import DynamoLockAcquireOperator as DynamoLockAcquireOperator
    from airflow_dynamo_lock.airflow.operators import (
        DynamoLockHeartbeatOperator as DynamoLockHeartbeatOperator,
    )
    from airflow_dynamo_lock.airflow.operators import DynamoLockReleaseOperator as DynamoLockReleaseOperator
    from airflow_dynamo_lock.airflow.sensors import DynamoLockSensor as DynamoLockSensor
    from airflow_dynamo_lock.airflow.settings import LockSettings as LockSettings
    from airflow_dynamo_lock.airflow.task_group import DynamoLock as DynamoLock
    from airflow_dynamo_lock.client.async_client import AsyncLockClient as AsyncLockClient
    from airflow_dynamo_lock.client.sdk import sdk_config as sdk_config
    from airflow_dynamo_lock.client.sync_client import LockClient as LockClient
    from airflow_dynamo_lock.client.threads import KeepAlive as KeepAlive
    from airflow_dynamo_lock.core.model.decisions import Decision as Decision
    from airflow_dynamo_lock.core.model.decisions import Loss as Loss
    from airflow_dynamo_lock.core.model.decisions import Removal as Removal
    from airflow_dynamo_lock.core.model.errors import CapacityMismatchError as CapacityMismatchError
    from airflow_dynamo_lock.core.model.errors import LockAccessError as LockAccessError
    from airflow_dynamo_lock.core.model.errors import LockDeadlockError as LockDeadlockError
    from airflow_dynamo_lock.core.model.errors import LockError as LockError
    from airflow_dynamo_lock.core.model.errors import LockLostError as LockLostError
    from airflow_dynamo_lock.core.model.errors import LockNotFoundError as LockNotFoundError
    from airflow_dynamo_lock.core.model.errors import LockNotHeldError as LockNotHeldError
    from airflow_dynamo_lock.core.model.errors import LockNotWaitingError as LockNotWaitingError
    from airflow_dynamo_lock.core.model.errors import LockRecordError as LockRecordError
    from airflow_dynamo_lock.core.model.errors import LockRemovedError as LockRemovedError
    from airflow_dynamo_lock.core.model.errors import LockTableError as LockTableError
    from airflow_dynamo_lock.core.model.errors import LockTimeoutError as LockTimeoutError
    from airflow_dynamo_lock.core.model.errors import LockUnavailableError as LockUnavailableError
    from airflow_dynamo_lock.core.model.errors import LockValueError as LockValueError
    from airflow_dynamo_lock.core.model.errors import LockVersionError as LockVersionError
    from airflow_dynamo_lock.core.model.kind import Kind as Kind
    from airflow_dynamo_lock.core.model.lease import Lease as Lease
    from airflow_dynamo_lock.core.model.lease import LeaseSet as LeaseSet
    from airflow_dynamo_lock.core.model.outcomes import Draining as Draining
    from airflow_dynamo_lock.core.model.outcomes import Lost as Lost
    from airflow_dynamo_lock.core.model.outcomes import Released as Released
    from airflow_dynamo_lock.core.model.outcomes import Renewed as Renewed
    from airflow_dynamo_lock.core.model.outcomes import StillHeld as StillHeld
    from airflow_dynamo_lock.core.model.record import Holder as Holder
    from airflow_dynamo_lock.core.model.record import LockRecord as LockRecord
    from airflow_dynamo_lock.core.model.record import QueuePosition as QueuePosition
    from airflow_dynamo_lock.core.model.record import Waiter as Waiter
    from airflow_dynamo_lock.core.model.state import LockState as LockState
    from airflow_dynamo_lock.events import LockEvent as LockEvent
    from airflow_dynamo_lock.events import subscribe as subscribe
    from airflow_dynamo_lock.events import unsubscribe as unsubscribe


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Carry out ``%load_ext airflow_dynamo_lock``, which adds ``%%dynamo_lock`` to a notebook."""
    from airflow_dynamo_lock.notebook.magics import DynamoLockMagics

    DynamoLockMagics(shell).load()


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Carry out ``%unload_ext airflow_dynamo_lock``."""
    from airflow_dynamo_lock.notebook.magics import DynamoLockMagics

    for each in [each for each in shell.configurables if isinstance(each, DynamoLockMagics)]:
        each.unload()


def __getattr__(name: str) -> Any:
    module = _MODULES.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as missing:
        without_airflow = missing.name == f"{__name__}.airflow" or importlib.util.find_spec("airflow") is None
        if module.startswith("airflow.") and without_airflow:
            raise ImportError(f"{name} needs Airflow: install the package airflow-dynamo-lock.") from None
        raise


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
