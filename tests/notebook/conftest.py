"""Fixtures of the notebook tests: a lock table, a kernel with the extension, and another client."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from airflow_dynamo_lock import LockClient
from deployments.engines import REGION, Engine
from deployments.kernels import Kernel
from deployments.patience import wait_until
from tests.cli.conftest import TABLE
from tests.cli.conftest import engine as engine
from tests.cli.conftest import key as key
from tests.cli.conftest import locks as locks


@pytest.fixture(scope="session")
def environment(engine: Engine) -> dict[str, str]:
    """The environment in which kernels find the table."""
    return {"AWS_ENDPOINT_URL_DYNAMODB": engine.endpoint_url, "AWS_DEFAULT_REGION": REGION}


@pytest.fixture(scope="module")
def kernel(environment: dict[str, str]) -> Iterator[Kernel]:
    """A kernel that has loaded the extension."""
    with Kernel(environment) as kernel:
        assert kernel.run("%load_ext airflow_dynamo_lock").error is None
        yield kernel


def is_free(locks: LockClient, key: str) -> bool:
    record = locks.get(key)
    return (record is None or not record.holders) and not locks.waiters(key)


def wait_until_free(locks: LockClient, key: str) -> None:
    """Wait until the lock has no holder and no waiter."""
    wait_until(lambda: is_free(locks, key), f"{key} is not free")


__all__ = ["TABLE"]
