"""The first waiter of a queue dies with its triggerer, or with its whole deployment, before the lock is free."""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import pytest

from deployments.deployment import Deployment
from proof.airflow.testbed import Testbed, wait_for

pytestmark = pytest.mark.proof

#: Locks in one test. In the queue of each, the first waiter dies.
LOCKS = 20
#: Longest time in seconds from the release to the next grant on a busy machine. On an idle one, it is 5 s, and what the
#: engine needs for the requests of all locks. A dead waiter that is not passed over delays the others for 16 to 21 s.
TAKEN = 15.0


@pytest.mark.parametrize("dies", ["triggerer", "deployment"])  # in this order: the deployment stays dead
def test_a_free_lock_is_taken_although_its_first_waiter_has_died(
    two_deployments: Testbed, key: str, dies: str, record_property: Any
) -> None:
    north, south = two_deployments.deployments
    locks = two_deployments.locks
    leases = [locks.acquire(f"{key}/{number}", lease=600) for number in range(LOCKS)]
    runs = dict[Deployment, list[str]]()
    for waiters, deployment in enumerate((north, south), start=1):
        runs[deployment] = [deployment.trigger("guarded", {"key": each.key, "seconds": 1}) for each in leases]
        for each in leases:
            wait_for(
                lambda key=each.key, waiters=waiters: len(locks.waiters(key)) == waiters or None,  # type: ignore[misc]
                f"{waiters} runs wait for {each.key}",
                240,
            )

    for component in [north.triggerer] if dies == "triggerer" else north.components:
        component.kill()
    released = []
    for each in leases:
        locks.release(each)
        released.append(time.time())
    # The ledger and the logs contain the times. Reads of the table would slow the engine down.
    wait_for(
        lambda: all(two_deployments.uses(each.key) for each in leases) or None,
        "a process is inside each lock",
        240,
    )
    acquired = [
        at.timestamp()
        for run_id in runs[south]
        for at, event in south.timed_log("guarded", run_id, "lock.acquire")
        if event.startswith("Acquired the lock")
    ]
    took = [later - earlier for earlier, later in zip(released, acquired, strict=True)]
    record_property("seconds", round(median(took), 1))
    assert max(took) <= TAKEN
    print(f"taken after {median(took):.1f} s (median of {len(took)}), {max(took):.1f} s at most")

    if dies == "triggerer":
        north.triggerer.start()
        north.wait_until_healthy()
    else:
        del runs[north]
    for deployment, run_ids in runs.items():
        for run_id in run_ids:
            assert deployment.wait("guarded", run_id).state == "success"
    for each in leases:
        two_deployments.assert_exclusive(each.key)
