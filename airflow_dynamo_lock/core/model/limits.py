"""Limits, each with its reason: DynamoDB's own, and those that the safety argument needs (docs/argument.md)."""

from __future__ import annotations

#: Longest time that an option accepts, in seconds: about thirty years, and no more than a thread can wait.
LONGEST_TIME = 1e9

#: DynamoDB's TTL may delete a record this long after the end of its last lease, in seconds.
RETENTION = 7 * 24 * 3600

#: Lowest `max_clock_skew`, in seconds. R3 (proof of death) uses up 3 s of it, by which a stamp may be early; 2 s are to
#: spare.
MIN_CLOCK_SKEW = 5.0

#: Largest difference between two writers' estimates of the server's time, milliseconds. The ``Date`` header has whole
#: seconds; a larger value only costs an occasional request.
ESTIMATES_DIFFER_MS = 2000

#: Highest number of slots of a lock.
MAX_SLOTS = 10**9

#: Capacity of a lock in shared mode: readers never run out of slots.
SHARED = MAX_SLOTS

#: Priorities run from the negative of this to this; a higher one is granted first.
MAX_PRIORITY = 999

#: Prefix of the keys under which waiting processes renew a lease of their own (`core/lock/presence.py`).
WAITING_PREFIX = "waiting:"

#: Highest number of locks acquired together: DynamoDB's limit for a transaction.
MAX_KEYS = 100

#: DynamoDB's limit for a partition key, in bytes of UTF-8.
MAX_KEY_BYTES = 2048

#: Our limit for the id of a lease or a process, in bytes. Ids are part of the record and of most requests.
MAX_ID_BYTES = 1024

#: Our limit for the reason of a decision, and the name of who makes it, in bytes: they are part of the record.
MAX_NOTE_BYTES = 500

#: Share of a lease that its holder does not use (R4, the holder gives up first). The clocks of two machines may differ
#: in rate by this much.
MARGIN = 0.1

#: Default of `release_grace`, in seconds: how long a drained lease lasts while processes are inside (R8).
RELEASE_GRACE = 15.0

#: Number of heartbeats that a process inside a lease sends in one `release_grace` (R9).
HEARTBEATS_PER_GRACE = 3

#: Last millisecond of the year 9999, the latest time that a `datetime` can represent.
LAST_MS = 253_402_300_799_999
