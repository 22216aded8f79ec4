"""A simulation for unit tests of the core: hosts with clocks of their own, and a DynamoDB table with faults.

The table is `proof.simulator.sdk.SimulatedClient`, or moto in this process. The true time, the clocks of the
hosts, the ``Date`` header and the faults of requests are simulated, and each test controls them. Operations
are generators, so a test can also stop one operation between two requests and run another one in between.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
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
from airflow_dynamo_lock.core.model.edits import Heartbeat
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
#: The server's time at the start of a test, in epoch milliseconds. It is not a whole second, because `Date`
#: headers are.
BEGIN_MS = 1_800_000_000_250
HOURS = 3600.0

# Faults of a request.
LOST = "applied, and the answer is lost"
LOST_THEN_RETRIED = "applied, the answer is lost, and the SDK retries the request"
UNSENT = "never arrives"
CONFLICT = "refused, because a transaction works on the same record"
DENIED = "denied by AWS, for example because credentials have expired"


class World:
    """True time, and an empty lock table.

    :param client: boto3 client for the table `TABLE`.
    :ivar now: true time, in seconds since the start of the test.
    :ivar dates: whether answers have a ``Date`` header. DynamoDB sends one, DynamoDB Local does not.
    :ivar shows_refused: whether the answer to a refused write contains the item. DynamoDB returns it,
        DynamoDB Local does not.
    :ivar faults: faults of the next requests, in order; ``""`` for none. Later requests have no fault.
    :ivar server_clock_offset: returns the seconds by which the clock of the server that answers next is ahead
        of true time.
    :ivar sent: all requests that were sent, in order.
    """

    def __init__(self, client: Any, *, dates: bool = True, shows_refused: bool = True) -> None:
        self.now = 0.0
        self.dates = dates
        self.shows_refused = shows_refused
        self.faults: deque[str] = deque()
        self.server_clock_offset: Callable[[], float] = lambda: 0.0
        self.sent: list[Request] = []
        self.client = client

    @property
    def server_ms(self) -> int:
        """The server's time, in epoch milliseconds."""
        return BEGIN_MS + round(self.now * 1000)

    def answer(self, request: Request, clock: Callable[[], float]) -> Reply:
        """Carry out a request, with the next fault of `faults`.

        :param clock: the sender's monotonic clock.
        :raises LockUnavailableError: the answer is lost, or the request never arrives.
        :raises LockConflictError: a transaction works on the same record.
        :raises LockAccessError: the request is denied.
        """
        self.sent.append(request)
        fault = self.faults.popleft() if self.faults else ""
        if fault == UNSENT:
            raise LockUnavailableError("DynamoDB cannot be reached.", maybe_applied=False)
        if fault == CONFLICT:
            raise LockConflictError("A transaction works on the same record.", maybe_applied=False)
        if fault == DENIED:
            raise LockAccessError("AWS denies access.")
        output, refused = self._apply(request)
        if fault == LOST:
            raise LockUnavailableError("The connection to DynamoDB broke.", maybe_applied=True)
        if fault == LOST_THEN_RETRIED:
            output, refused = self._apply(request)
        return Reply(
            output,
            sent_at=clock(),
            received_at=clock(),
            # A `Date` header has whole seconds.
            server_ms=(self.server_ms + round(self.server_clock_offset() * 1000)) // 1000 * 1000
            if self.dates
            else None,
            refused=refused,
            retried=fault == LOST_THEN_RETRIED,
        )

    def _apply(self, request: Request) -> tuple[Mapping[str, Any], bool]:
        """Send a request to the table. Returns the output, and whether the write's condition failed."""
        try:
            limits.check(request.action, request.params)
            return getattr(self.client, xform_name(request.action))(**request.params), False
        except limits.LimitExceeded as exceeded:  # moto does not check all limits
            invalid: Any = {"Error": {"Code": "ValidationException", "Message": str(exceeded)}}
            sdk.answer_to(ClientError(invalid, request.action), request, 0.0)
            raise
        except ClientError as failure:
            sdk.answer_to(failure, request, 0.0)  # raises the package's error, unless the condition failed
            return (failure.response if self.shows_refused else {}), True

    def item(self, key: str = KEY) -> dict[str, Any] | None:
        """Read a lock's item; None if there is none."""
        key_of = {"key": {"S": key}, "entry": {"S": "lock"}}
        item: dict[str, Any] | None = self.client.get_item(TableName=TABLE, Key=key_of).get("Item")
        return item

    def record(self, key: str = KEY) -> LockRecord:
        """Read a lock, which must have an item."""
        item = self.item(key)
        assert item is not None, f"the lock {key!r} has no record"
        return NativeFormat(TABLE).record(item, None)

    def store(self, **attributes: Any) -> None:
        """Write the item of the lock `KEY` as another program might, with these attributes in DynamoDB's
        typed form."""
        item = {"key": {"S": KEY}, "entry": {"S": "lock"}, **attributes}
        self.client.put_item(TableName=TABLE, Item=item)

    def delete(self, key: str = KEY) -> None:
        """Delete a lock's item, as DynamoDB's TTL does."""
        self.client.delete_item(TableName=TABLE, Key={"key": {"S": key}, "entry": {"S": "lock"}})

    def actions(self) -> list[str]:
        """Return the actions of all requests that were sent, in order."""
        return [request.action for request in self.sent]


@dataclass
class Host:
    """A process on a machine of its own, with the core's operations.

    :ivar name: owner of its leases, and the default lease id.
    :ivar wall_clock_offset: seconds by which its wall clock is ahead of true time.
    :ivar clock_rate: seconds that its monotonic clock counts in one second of true time.
    :ivar booted: value of its monotonic clock at the start of the test, in seconds.
    :ivar dates: whether it sees ``Date`` headers; a proxy may strip them.
    :ivar clock: its estimate of the server's time.
    :ivar stamps: all stamps that it has made, in order.
    """

    world: World
    name: str = "host"
    wall_clock_offset: float = 0.0
    clock_rate: float = 1.0
    booted: float = 5000.0
    max_clock_skew: float = MAX_CLOCK_SKEW
    dates: bool = True
    clock: ServerClock = field(default_factory=ServerClock)
    stamps: list[Stamp] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.observer = Observer(self.max_clock_skew)
        self.queue = WaitQueue.of(NativeFormat(TABLE), self.stamp, self.observer)
        self.operations = Operations.of(self.queue.format, self.stamp, self.observer, self.queue)
        self.presence = Presence(self.queue, self.operations)

    def now(self) -> float:
        """Return its monotonic clock, in seconds."""
        return self.booted + self.world.now * self.clock_rate

    def stamp(self) -> Stamp:
        """Make a stamp. Its version is the host's name and a number, not a UUID."""
        host_ms = self.world.server_ms + round(self.wall_clock_offset * 1000)
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
        """Return a claim. By default it claims one slot of the plain lock `KEY`, with a lease of 30 s."""
        defaults: dict[str, Any] = {"key": KEY, "owner": self.name, "lease_ms": 30_000, "grace_ms": 15_000}
        return Claim(**(defaults | {"lease_id": lease_id or self.name} | options))

    def send(self, request: Request) -> Reply:
        """Send a request, and correct the estimate of the server's time by its answer."""
        reply = self.world.answer(request, self.now)
        if not self.dates:
            reply = replace(reply, server_ms=None)
        self.clock.note(reply)
        return reply

    def carry_out(self, effect: Effect) -> Reply | float:
        """Carry out an effect of an operation, as a client does. `Sleep` and `WaitForSlots` advance true
        time."""
        match effect:
            case Request():
                return self.send(effect)
            case Sleep(seconds):
                self.world.now += seconds / self.clock_rate
            case WaitForSlots(poll_interval=interval, seconds=seconds):
                self.world.now += (interval if seconds is None else min(interval, seconds)) / self.clock_rate
        return self.now()

    def run(self, operation: Operation[T]) -> T:
        """Run an operation to its end, and return its result."""
        return Paused(self, operation).finish()

    def start(self, operation: Operation[T]) -> Paused[T]:
        """Start an operation, and stop it before its first effect."""
        return Paused(self, operation)

    # Operations that many tests use. The default lease id is the host's name.

    def take(self, lease_id: str | None = None, *, owns_lease_id: bool = False, **options: Any) -> Any:
        """Try to acquire the lock without waiting. Returns `Granted` or `Busy`."""
        return self.run(
            self.operations.attempting.try_acquire(
                self.claim(lease_id, **options), owns_lease_id=owns_lease_id
            )
        )

    def start_acquire(
        self,
        lease_id: str | None = None,
        *,
        timeout: float | None = None,
        poll_interval: float = 1.0,
        owns_lease_id: bool = True,
        holding: Sequence[Lease] = (),
        **options: Any,
    ) -> Paused[Granted]:
        """Start an acquire that waits while the lock is taken, and stop it before its first effect."""
        return self.start(
            self.operations.acquiring.acquire(
                self.claim(lease_id, **options),
                now=self.now(),
                timeout=timeout,
                poll_interval=poll_interval,
                owns_lease_id=owns_lease_id,
                holding=holding,
            )
        )

    def heartbeat(self, lease_id: str | None = None, *, lease_ms: int = 30_000) -> Any:
        """Send a heartbeat. Returns `Renewed` or `Lost`."""
        return self.run(self.operations.renewing.renew(KEY, lease_id or self.name, lease_ms, Heartbeat()))

    def enter(
        self, process: str, lease_id: str | None = None, *, lease_ms: int = 15_000, retry_for: float = 0.0
    ) -> Any:
        """Add a guarded process to a lease. Returns `Renewed`, `Draining` or `Lost`."""
        return self.start_enter(process, lease_id, lease_ms=lease_ms, retry_for=retry_for).finish()

    def start_enter(
        self, process: str, lease_id: str | None = None, *, lease_ms: int = 15_000, retry_for: float = 0.0
    ) -> Paused[Any]:
        """Start to add a guarded process to a lease, and stop before the first effect."""
        return self.start(
            self.operations.renewing.enter(
                KEY, lease_id or self.name, lease_ms, process, self.now() + retry_for
            )
        )

    def start_leave(self, process: str, *, slots: int = 1, release: bool = False) -> Paused[Any]:
        """Start to remove a guarded process from the lease named as this host, and stop before the first effect."""
        lease = self.lease(self.name, slots=slots)
        return self.start(self.operations.releasing.leave(lease, process, release=release))

    def leave(
        self, process: str, lease_id: str | None = None, *, slots: int = 1, release: bool = False
    ) -> Any:
        """Remove a guarded process from a lease. Returns `Released`, `Renewed`, `Draining` or `Lost`."""
        lease = self.lease(lease_id or self.name, slots=slots)
        return self.run(self.operations.releasing.leave(lease, process, release=release))

    def lease(self, lease_id: str, *, slots: int = 1) -> Lease:
        """Return the lease with this id, as a process that leaves it knows it."""
        return Lease(KEY, lease_id, 1, self.name, slots, 1, 15_000, 15_000, 0)

    def release(self, lease_id: str | None = None, *, slots: int = 1, grace_ms: int = 15_000) -> Any:
        """Release a lease. Returns `Released`, `Draining` or `Lost`."""
        return self.run(
            self.operations.releasing.release(KEY, lease_id or self.name, slots, grace_ms, confirmed=True)
        )

    def term(self) -> Term:
        """Return a new lease term on this host's clock."""
        return Term(self.now)


def a_holder(lease_id: str = "a", **changed: Any) -> Holder:
    """Return a holder with these attributes, and defaults for all others."""
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
    """Return a lease of one slot of a plain lock."""
    return Lease(key, lease_id, 1, "me", 1, 1, 30_000, 15_000, 0)


class Paused(Generic[T]):
    """An operation that stops before each of its effects, so that a test can run other operations in between.

    :ivar effect: the next effect; None if the operation has ended.
    """

    effect: Effect | None

    def __init__(self, host: Host, operation: Operation[T]) -> None:
        self._host, self._operation = host, operation
        self._resume(lambda: next(operation))

    def step(self) -> Self:
        """Carry out the next effect, and stop before the one after it."""
        assert self.effect is not None
        try:
            answer = self._host.carry_out(self.effect)
        except LockError as raised:
            failure = raised
            self._resume(lambda: self._operation.throw(failure))
        else:
            self._resume(lambda: self._operation.send(answer))
        return self

    def until(self, action: str) -> Self:
        """Continue, and stop before the next request with this action, such as ``PutItem``."""
        while not (isinstance(self.effect, Request) and self.effect.action == action):
            self.step()
        return self

    @property
    def request(self) -> Request:
        """The next effect, which must be a request."""
        assert isinstance(self.effect, Request)
        return self.effect

    def interrupt(self, failure: BaseException) -> Self:
        """Raise an exception in the operation instead of its next effect."""
        self._resume(lambda: self._operation.throw(failure))
        return self

    def finish(self) -> T:
        """Run the operation to its end, and return its result."""
        while self.effect is not None:
            self.step()
        outcome: T = self._outcome
        return outcome

    def _resume(self, resume: Callable[[], Effect]) -> None:
        """Continue the operation up to its next effect, or to its result."""
        try:
            self.effect = resume()
        except StopIteration as end:
            self.effect, self._outcome = None, end.value
