"""Records of what processes rely on: the terms of their leases, and when they work under them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from airflow_dynamo_lock.core.model.lease import Lease, Term
from proof.simulator.world import Process, World

NEVER = float("inf")


class RecordedTerm(Term):
    """A lease term that records all its changes.

    :ivar history: changes in order, as pairs of true times: the time of the change, and the end of the lease
        as its holder computes it from then on. The end is -inf once the lease is lost.
    """

    def __init__(
        self, world: World, now: Callable[[], float], on_renewed: Callable[[RecordedTerm], None]
    ) -> None:
        super().__init__(now)
        assert world.running is not None
        self._process, self._on_renewed = world.running, on_renewed
        self.history: list[tuple[float, float]] = []

    def renewed(self, sent_at: float, lease_ms: int) -> None:
        super().renewed(sent_at, lease_ms)
        if not self.lost:
            self.history.append((self._process.true_now, self._process.true_time(self.until)))
            self._on_renewed(self)

    def lose(self, why: str) -> None:
        super().lose(why)
        self.history.append((self._process.true_now, -NEVER))

    @property
    def lost_at(self) -> float:
        """True time of the loss; `NEVER` if the lease was not lost."""
        return min((at for at, until in self.history if until == -NEVER), default=NEVER)

    @property
    def runs_out_at(self) -> float:
        """True time at which the lease ends, or would have ended if it had not been lost before."""
        lost = self.lost_at
        return max(until for at, until in self.history if at <= lost)


@dataclass
class LeaseUse:
    """The work of one process under one lease.

    :ivar begin: true time at which the work began.
    :ivar end: true time from which the process no longer counts on the lease, even if the term lasts longer.
    :ivar left: true time at which the process left the code that the lease protects.
    :ivar guarded: whether the real guard stops that code.
    """

    process: Process
    lease: Lease
    begin: float
    end: float = NEVER
    left: float = NEVER
    guarded: bool = False

    @property
    def term(self) -> RecordedTerm:
        """Return the lease's term."""
        assert isinstance(self.lease.term, RecordedTerm)
        return self.lease.term

    def spans(self) -> Iterator[tuple[float, float]]:
        """Yield the spans of true time in which the process counted on the lease."""
        history = self.term.history
        for (since, until), (next_change, _) in zip(history, [*history[1:], (NEVER, NEVER)], strict=True):
            begin, end = max(since, self.begin), min(until, next_change, self.end)
            if begin < end:
                yield begin, end


@dataclass(frozen=True)
class Grant:
    """A grant that its caller has received.

    :ivar begun: true time at which the caller began to acquire.
    :ivar confirmed: true time at which the caller received the grant.
    :ivar valid: whether the lease was still valid at that time.
    """

    key: str
    lease_id: str
    token: int
    begun: float
    confirmed: float
    valid: bool
