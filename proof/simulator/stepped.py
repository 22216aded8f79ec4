"""Hosts, clocks and a DynamoDB that a test moves by hand.

The table is `proof.simulator.sdk.SimulatedClient`, or moto in this process. Around it everything is simulated: the one
true time, each host's own clocks, the ``Date`` header, and what happens to a request on its way. Operations are
generators, so a test can also stop one between two requests and let another go first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, Self

from botocore import xform_name
from botocore.exceptions import ClientError

from airflow_dynamo_lock.client import sdk
from airflow_dynamo_lock.core.effects import (
    Effect,
    Operation,
    Reply,
    Request,
    ServerClock,
    Sleep,
    Stamp,
    T,
    WaitForSlots,
)
from airflow_dynamo_lock.core.liveness import MAX_CLOCK_SKEW, Observer
from airflow_dynamo_lock.core.lock.operations import Operations
from airflow_dynamo_lock.core.lock.presence import Presence
from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.edits import Enter, Heartbeat
from airflow_dynamo_lock.core.model.errors import (
    LockAccessError,
    LockConflictError,
    LockError,
    LockUnavailableError,
)
from airflow_dynamo_lock.core.model.lease import Lease, Term
from airflow_dynamo_lock.core.model.outcomes import Granted
from airflow_dynamo_lock.core.model.record import Holder, LockRecord
from airflow_dynamo_lock.core.queue.queue import WaitQueue
from airflow_dynamo_lock.core.table.native import NativeFormat
from deployments import limits

TABLE = "locks"
KEY = "warehouse/orders"
#: The server's time when a simulation begins, epoch milliseconds; not on a whole second.
BEGIN_MS = 1_800_000_000_250
HOURS = 3600.0

# What may happen to a request on its way.
LOST = "applied, but its answer is lost"
LOST_THEN_RETRIED = "applied, its answer is lost, and the SDK sends it again"
UNSENT = "it never arrives"
CONFLICT = "a transaction on the same record is in its way"
DENIED = "AWS refuses it, as when credentials have expired"


class World:
    """The one true time, and an empty lock table in it.

    :param client: a boto3 client of a table `TABLE`.
    :ivar now: true time, seconds.
    :ivar dates: whether the server sends ``Date`` headers. DynamoDB does, DynamoDB Local does not.
    :ivar shows_refused: whether a refused write shows the item. DynamoDB does, DynamoDB Local does not.
    :ivar fates: what happens to the next requests; those after them arrive and are answered.
    :ivar server_off: by how many seconds the clock of the server is off that answers next.
    :ivar sent: every request that was sent, in order.
    """

    def __init__(self, client: Any, *, dates: bool = True, shows_refused: bool = True) -> None:
        self.now = 0.0
        self.dates = dates
        self.shows_refused = shows_refused
        self.fates: deque[str] = deque()
        self.server_off: Callable[[], float] = lambda: 0.0
        self.sent: list[Request] = []
        self.client = client

    @property
    def server_ms(self) -> int:
        """The server's time, epoch milliseconds."""
        return BEGIN_MS + round(self.now * 1000)

    def answer(self, request: Request, clock: Callable[[], float]) -> Reply:
        """Carry a request out for a host with that monotonic clock.

        :raises LockUnavailableError: its answer is lost, or it never arrived.
        :raises LockAccessError: it is denied.
        """
        self.sent.append(request)
        fate = self.fates.popleft() if self.fates else ""
        if fate == UNSENT:
            raise LockUnavailableError("DynamoDB cannot be reached.", maybe_applied=False)
        if fate == CONFLICT:
            raise LockConflictError("A transaction is at work on the record.", maybe_applied=False)
        if fate == DENIED:
            raise LockAccessError("AWS does not allow it.")
        output, refused = self._apply(request)
        if fate == LOST:
            raise LockUnavailableError("The connection to DynamoDB broke.", maybe_applied=True)
        if fate == LOST_THEN_RETRIED:
            output, refused = self._apply(request)
        return Reply(
            output,
            sent_at=clock(),
            received_at=clock(),
            # The header has whole seconds.
            server_ms=(self.server_ms + round(self.server_off() * 1000)) // 1000 * 1000
            if self.dates
            else None,
            refused=refused,
            retried=fate == LOST_THEN_RETRIED,
        )

    def _apply(self, request: Request) -> tuple[Mapping[str, Any], bool]:
        try:
            limits.check(request.action, request.params)
            return getattr(self.client, xform_name(request.action))(**request.params), False
        except limits.LimitExceeded as exceeded:  # moto does not mind
            invalid: Any = {"Error": {"Code": "ValidationException", "Message": str(exceeded)}}
            sdk.answer_to(ClientError(invalid, request.action), request, 0.0)
            raise
        except ClientError as failure:
            sdk.answer_to(failure, request, 0.0)  # raises all but a refusal, as users see it
            return (failure.response if self.shows_refused else {}), True

    def item(self, key: str = KEY) -> dict[str, Any] | None:
        """The lock's item as it is stored."""
        key_of = {"key": {"S": key}, "entry": {"S": "lock"}}
        item: dict[str, Any] | None = self.client.get_item(TableName=TABLE, Key=key_of).get("Item")
        return item

    def record(self, key: str = KEY) -> LockRecord:
        """The lock as it is stored."""
        item = self.item(key)
        assert item is not None, f"there is no record of {key!r}"
        return NativeFormat(TABLE).record(item, None)

    def store(self, **attributes: Any) -> None:
        """Write an item by hand, as another program would."""
        item = {"key": {"S": KEY}, "entry": {"S": "lock"}, **attributes}
        self.client.put_item(TableName=TABLE, Item=item)

    def delete(self, key: str = KEY) -> None:
        """Remove the record, as DynamoDB's TTL does."""
        self.client.delete_item(TableName=TABLE, Key={"key": {"S": key}, "entry": {"S": "lock"}})

    def actions(self) -> list[str]:
        """What was asked of DynamoDB, in order."""
        return [request.action for request in self.sent]


@dataclass
class Host:
    """One process on a machine of its own: it knows of the table only what its own requests told it.

    :ivar wall_clock_off: by how many seconds its wall clock is ahead of true time.
    :ivar clock_rate: how many seconds its monotonic clock counts in one.
    :ivar booted: what its monotonic clock showed when the simulation began.
    """

    world: World
    name: str = "host"
    wall_clock_off: float = 0.0
    clock_rate: float = 1.0
    booted: float = 5000.0
    max_clock_skew: float = MAX_CLOCK_SKEW
    clock: ServerClock = field(default_factory=ServerClock)
    stamps: list[Stamp] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.observer = Observer(self.max_clock_skew)
        self.queue = WaitQueue.of(NativeFormat(TABLE), self.stamp, self.observer)
        self.operations = Operations.of(self.queue.format, self.stamp, self.observer, self.queue)
        self.presence = Presence(self.queue, self.operations)

    def now(self) -> float:
        """Its monotonic clock."""
        return self.booted + self.world.now * self.clock_rate

    def stamp(self) -> Stamp:
        host_ms = self.world.server_ms + round(self.wall_clock_off * 1000)
        self.stamps.append(
            Stamp(
                f"{self.name}-{len(self.stamps)}",
                self.clock.at(self.now()),
                host_ms,
                self.now(),
                self.clock.answered,
                self.now() - self.clock.told_at,
            )
        )
        return self.stamps[-1]

    def claim(self, lease_id: str | None = None, **options: Any) -> Claim:
        """What it would like to hold: `KEY`, for 30 s after each heartbeat."""
        defaults: dict[str, Any] = {"key": KEY, "owner": self.name, "lease_ms": 30_000, "grace_ms": 15_000}
        return Claim(**(defaults | {"lease_id": lease_id or self.name} | options))

    def send(self, request: Request) -> Reply:
        reply = self.world.answer(request, self.now)
        self.clock.note(reply)
        return reply

    def carry_out(self, effect: Effect) -> Reply | float:
        """What a driver does for an operation. Sleeping and waiting for room lets true time pass."""
        match effect:
            case Request():
                return self.send(effect)
            case Sleep(seconds):
                self.world.now += seconds / self.clock_rate
            case WaitForSlots(poll_interval=interval, seconds=seconds):
                self.world.now += (interval if seconds is None else min(interval, seconds)) / self.clock_rate
        return self.now()

    def run(self, operation: Operation[T]) -> T:
        """Carry an operation out; sleeping and waiting lets true time pass."""
        return Paused(self, operation).finish()

    def start(self, operation: Operation[T]) -> Paused[T]:
        """Begin an operation and stop before its first effect."""
        return Paused(self, operation)

    # What most tests do with one.

    def take(self, lease_id: str | None = None, *, undo: bool = False, **options: Any) -> Any:
        """Try to acquire: `Granted` or `Busy`."""
        return self.run(self.operations.attempting.try_acquire(self.claim(lease_id, **options), undo=undo))

    def acquiring(
        self,
        lease_id: str | None = None,
        *,
        timeout: float | None = None,
        poll_interval: float = 1.0,
        undo: bool = True,
        **options: Any,
    ) -> Paused[Granted]:
        """Begin to acquire, waiting if the lock is taken, and stop before the first request."""
        return self.start(
            self.operations.acquiring.acquire(
                self.claim(lease_id, **options),
                now=self.now(),
                timeout=timeout,
                poll_interval=poll_interval,
                undo=undo,
            )
        )

    def beat(self, lease_id: str | None = None, *, lease_ms: int = 30_000) -> Any:
        """Send a heartbeat: `Renewed` or `Lost`."""
        return self.run(self.operations.renewing.renew(KEY, lease_id or self.name, lease_ms, Heartbeat()))

    def enter(self, process: str, lease_id: str | None = None, *, lease_ms: int = 15_000) -> Any:
        """Let a process enter: `Renewed`, `Draining` or `Lost`."""
        return self.run(self.operations.renewing.renew(KEY, lease_id or self.name, lease_ms, Enter(process)))

    def leave(self, process: str, lease_id: str | None = None, *, slots: int = 1) -> Any:
        """Let a process leave: `Released`, `Renewed` or `Lost`."""
        return self.run(
            self.operations.releasing.leave(KEY, lease_id or self.name, process, slots, 15_000, 15_000)
        )

    def release(self, lease_id: str | None = None, *, slots: int = 1, grace_ms: int = 15_000) -> Any:
        """Give back: `Released`, `Draining` or `Lost`."""
        return self.run(
            self.operations.releasing.release(KEY, lease_id or self.name, slots, grace_ms, confirmed=True)
        )

    def term(self) -> Term:
        """A lease's time by this host's clock."""
        return Term(self.now)


def a_holder(lease_id: str = "a", **changed: Any) -> Holder:
    """A holder as a record may show it."""
    defaults: dict[str, Any] = {
        "owner": "me",
        "slots": 1,
        "lease_ms": 30_000,
        "grace_ms": 15_000,
        "version": "v1",
        "acquired_at_ms": 0,
    }
    return Holder(lease_id, **(defaults | changed))


def a_lease(lease_id: str, key: str = KEY) -> Lease:
    """A lease as its holder knows it."""
    return Lease(key, lease_id, 1, "me", 1, 1, 30_000, 15_000, 0)


class Paused(Generic[T]):
    """An operation that stops before each of its effects, so that others can go first.

    :ivar effect: what it is about to do; None when it has ended.
    """

    effect: Effect | None

    def __init__(self, host: Host, operation: Operation[T]) -> None:
        self._host, self._operation = host, operation
        self._go_on(lambda: next(operation))

    def step(self) -> Self:
        """Do what it was about to do, and stop before the next effect."""
        assert self.effect is not None
        try:
            answer = self._host.carry_out(self.effect)
        except LockError as raised:
            failure = raised
            self._go_on(lambda: self._operation.throw(failure))
        else:
            self._go_on(lambda: self._operation.send(answer))
        return self

    def until(self, action: str) -> Self:
        """Let it go on, and stop before its next request of that kind, such as ``PutItem``."""
        while not (isinstance(self.effect, Request) and self.effect.action == action):
            self.step()
        return self

    @property
    def request(self) -> Request:
        """The request that it is about to send."""
        assert isinstance(self.effect, Request)
        return self.effect

    def interrupt(self, failure: BaseException) -> Self:
        """Let that happen instead of what it was about to do."""
        self._go_on(lambda: self._operation.throw(failure))
        return self

    def finish(self) -> T:
        """Let it go on to its end."""
        while self.effect is not None:
            self.step()
        outcome: T = self._outcome
        return outcome

    def _go_on(self, resume: Callable[[], Effect]) -> None:
        try:
            self.effect = resume()
        except StopIteration as end:
            self.effect, self._outcome = None, end.value
