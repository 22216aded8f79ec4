"""The first waiter in a queue dies with its triggerer, or with its whole deployment, while the lock gets free."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime
from statistics import median
from typing import Any

import pytest

from deployments.deployment import Deployment
from proof.airflow.testbed import Testbed, start_testbed, wait_until

pytestmark = pytest.mark.proof

#: Locks in one test. In the queue of each, the first waiter dies.
LOCKS = 20
#: Longest time in seconds from the release to the next grant on a busy machine. On an idle one, 6 s. A waiter that is
#: not passed over delays the others for 21 s.
TAKEN = 15.0
#: Longest time from the last grant to the first lines of all processes, in seconds.
AIRFLOW = 60.0


@pytest.fixture(scope="module")
def two_deployments(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Testbed]:
    with start_testbed(tmp_path_factory.mktemp("first-in-queue"), "north", "south") as testbed:
        yield testbed


@pytest.mark.parametrize("dies", ["triggerer", "deployment"])  # in this order: the deployment stays dead
def test_a_free_lock_is_taken_although_the_first_in_its_queue_has_died(
    two_deployments: Testbed, key: str, dies: str, record_property: Any
) -> None:
    north, south = two_deployments.deployments
    locks = two_deployments.locks
    leases = [locks.acquire(f"{key}/{number}", lease=600) for number in range(LOCKS)]
    runs = list[tuple[Deployment, str]]()
    for waiters, deployment in enumerate((north, south), start=1):
        runs += [
            (deployment, deployment.trigger("guarded", {"key": each.key, "seconds": 1})) for each in leases
        ]
        for each in leases:
            wait_until(
                lambda key=each.key, waiters=waiters: len(locks.waiters(key)) == waiters or None,  # type: ignore[misc]
                f"{waiters} runs wait for {each.key}",
                240,
            )

    for component in [north.triggerer] if dies == "triggerer" else north.components:
        component.kill()
    released = {}
    for each in leases:
        locks.release(each)
        released[each.key] = time.time()
    # The ledger and the logs tell the times: reads of the table would slow the engine down.
    wait_until(
        lambda: all(two_deployments.uses(each.key) for each in leases) or None,
        "a process is inside each lock",
        TAKEN + AIRFLOW,
    )
    took = [_acquired(south, each) - at for each, at in released.items()]
    record_property("seconds", round(median(took), 1))
    assert max(took) <= TAKEN
    print(f"taken after {median(took):.1f} s (median of {len(took)}), {max(took):.1f} s at most")

    if dies == "triggerer":
        north.triggerer.start()
        north.wait_until_healthy()
    for deployment, run_id in runs:
        if dies == "triggerer" or deployment is south:
            assert deployment.wait("guarded", run_id).state == "success"
    for each in leases:
        two_deployments.assert_exclusive(each.key)


def _acquired(deployment: Deployment, key: str) -> float:
    """When a run of the deployment acquired the lock, in epoch seconds, by the log of its task."""
    logs = (deployment.home / "logs" / "dag_id=guarded").rglob("task_id=lock.acquire/*.log")
    lines = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    (line,) = [each for each in lines if each["event"].startswith(f"Acquired the lock {key!r}")]
    return datetime.fromisoformat(line["timestamp"]).timestamp()
