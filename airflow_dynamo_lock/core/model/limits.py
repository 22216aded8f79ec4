"""Named limits, each with its reason: DynamoDB's own, and those that the safety argument needs (docs/argument.md)."""

from __future__ import annotations

#: No time is longer than this, in seconds: thirty years, about what an operating system lets a thread wait.
LONGEST_TIME = 1e9


#: How long a record is kept after its last write, in seconds: by then DynamoDB's TTL may delete it.
RETENTION = 7 * 24 * 3600


#: The least `max_clock_skew`, in seconds. The argument of rule R3 takes this much of it for itself: a stamp may be up
#: to 3 s early, and one that arrives late up to 2 s older than the one that it replaces.
MIN_CLOCK_SKEW = 5.0


#: No lock has more slots than this.
MAX_SLOTS = 10**9


#: The capacity of a lock that is held in shared mode: a semaphore that nobody can exhaust.
SHARED = MAX_SLOTS


#: Whose waiting is how urgent: from minus this to this, the larger the sooner.
MAX_PRIORITY = 999


#: Keys that begin like this are the leases by which processes that wait show that they live (`protocol.line`).
WAITING_PREFIX = "waiting:"


#: What a transaction of DynamoDB takes: so many locks can be taken together.
MAX_KEYS = 100


#: DynamoDB's limit for a partition key, in bytes of UTF-8.
MAX_KEY_BYTES = 2048


#: Ours for the id of a lease or of a process. They stand in the record, and in every request about them.
MAX_ID_BYTES = 1024


#: The share of a lease that its holder does without (rule R4): two machines' clocks may run at rates that differ by
#: this much, and a holder still gives up before another may take over.
MARGIN = 0.1


#: How long a lease lasts after it was abandoned while processes were inside (rule R8), in seconds.
RELEASE_GRACE = 15.0


# The end of the year 9999, epoch milliseconds: what a datetime can show. No lease is as long.
LAST_MS = 253_402_300_799_999
