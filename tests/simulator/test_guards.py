"""The guard's module as the simulation loads it (`proof.simulator.guards`)."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

from airflow_dynamo_lock.core.model.lease import Lease, Term
from proof.simulator.guards import GUARD
from proof.simulator.stepped import a_lease


def test_a_guard_that_would_have_to_stop_the_task_at_once_enters_again() -> None:
    left = iter([1.0, 10.0])

    def enter(lease: Lease, process: str) -> Lease:
        term = Term(lambda: 0.0)
        term.renewed(stamped_at=0.0, lease_ms=round(next(left) * 1000))
        return replace(lease, term=term)

    client = SimpleNamespace(
        enter=enter,
        keep_alive=lambda *_, **__: SimpleNamespace(stop=lambda: None),
        leave=lambda *_, **__: None,
    )
    guard = GUARD.Guard(client, [a_lease("a")], None)

    guard.enter()
    guard.leave()

    assert next(left, None) is None, "it has entered twice"
    assert guard.leases[0].remaining() == 9.0
