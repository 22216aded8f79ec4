"""When the monitor of a lease calls `on_danger`, on a simulated clock."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest

from airflow_dynamo_lock.client.leases import monitor
from airflow_dynamo_lock.core.effects import Sleep
from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet, Term

#: Seconds for which a holder relies on its lease after a heartbeat, and the safe time.
LASTS, SAFE = 9.0, 3.0


class Clock:
    """A holder's clock, and its lease."""

    def __init__(self) -> None:
        self.now = 0.0
        self.term = Term(lambda: self.now)
        self.term.renewed(0.0, 10_000)
        self.lease = Lease("key", "a", 1, "me", 1, 1, 10_000, 5_000, 0, term=self.term)

    def dangers(self, heartbeats: Sequence[float] = (), until: float = 60.0) -> list[tuple[float, float]]:
        """Return the calls of `on_danger`: their times, and the remaining seconds of the lease.

        :param heartbeats: times of the successful heartbeats, in ascending order.
        """
        calls: list[tuple[float, float]] = []
        watching = monitor(self.lease, SAFE, lambda lease, left: calls.append((round(self.now, 3), left)))
        for effect in watching:
            assert isinstance(effect, Sleep)
            woken_at = self.now + effect.seconds
            if woken_at > until:
                break
            for at in heartbeats:
                if self.now < at <= woken_at:
                    self.term.renewed(at, 10_000)
            self.now = woken_at
        return calls


def test_a_lease_that_is_renewed_in_time_is_in_no_danger() -> None:
    assert Clock().dangers(range(1, 60), until=50.0) == []


@pytest.mark.parametrize("renewed_at", [6.5, 7.0, 8.9])
def test_a_danger_is_reported_once_and_again_after_a_renewal(
    renewed_at: float,
) -> None:
    clock = Clock()
    (first, left), (second, left_again) = clock.dangers([renewed_at])
    assert first == pytest.approx(LASTS - SAFE)
    assert left == pytest.approx(SAFE)
    assert renewed_at + LASTS - SAFE <= second <= renewed_at + LASTS - SAFE + SAFE / 10
    assert SAFE * 0.9 <= left_again <= SAFE
    assert clock.lease.remaining() == 0.0, "the monitor ended with the lease"


def test_a_lease_that_is_always_renewed_late_is_in_danger_each_time() -> None:
    called = [at for at, _ in Clock().dangers(range(8, 40, 8), until=45.0)]
    assert len(called) == 5
    assert all(7.5 <= later - earlier <= 8.5 for earlier, later in pairwise(called))


def test_a_lease_that_is_lost_is_not_in_danger() -> None:
    clock = Clock()
    clock.term.lose("it was broken")
    assert clock.dangers() == []


def test_a_callback_that_fails_does_not_end_the_monitor(caplog: pytest.LogCaptureFixture) -> None:
    clock, calls = Clock(), []

    def fail(lease: Lease, left: float) -> None:
        calls.append(lease.key)
        raise RuntimeError("no pager")

    other = Lease("other", "a", 1, "me", 1, 1, 10_000, 5_000, 0, term=clock.term)
    watching = monitor(LeaseSet((clock.lease, other)), SAFE, fail)
    clock.now = 6.5
    next(watching)
    clock.term.renewed(6.5, 10_000)
    next(watching)
    clock.now = 13.0
    next(watching)

    assert calls == ["key", "other"] * 2
    assert "The on_danger callback of the lock 'other' failed." in caplog.text
    assert "no pager" in caplog.text
