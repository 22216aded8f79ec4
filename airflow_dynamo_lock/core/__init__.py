"""The lock itself: which requests to send to DynamoDB, and what the responses mean.

Nothing here does I/O, reads the time or makes random numbers; only the poller measures its own processor time. An
operation is a generator that yields *effects* (a
request, a sleep, a wait, a callback) and receives their results; it returns an outcome or raises an error. The clients
(`airflow_dynamo_lock.client`) carry out the effects on boto3 and aiobotocore, the tests on a simulated table.

The folders and modules (*rooms*) of the core, each of which imports only those before it in this list:

- `model`: leases, records, claims, outcomes, errors, limits; checks of arguments.
- `effects`, `liveness`: what an operation may ask for; when a holder is dead.
- `table`: a format builds requests and reads items. `table.format` is the seam between the lock and all formats.
- `queue`: the waiters of a lock, in order.
- `wait`: how waiters notice that a lock has become free.
- `lock`: the operations: acquire, renew, release, administer.
- `foreign`: the table formats of other lock libraries.

A lease passes through these states, all of which the record shows:

==============  ==========================================  ====================  ===================================
state           in the record                               processes may enter   ends
==============  ==========================================  ====================  ===================================
held            among ``holders``                           yes                   release, drain, break, reclaim
draining        ``draining``; ``lease_ms`` is the grace     no                    last process leaves, break, reclaim
cooling down    ``cooling_down``; rest of ``min_hold``      no                    by itself
gone            not among ``holders``                       no                    –
==============  ==========================================  ====================  ===================================

Comments cite these rules, which docs/protocol.md states and docs/argument.md explains: R1 (one conditional write),
R2 (a refusal shows the winner), R3 (proof of death), R4 (the holder gives up first), R5 (a lost reply loses nothing),
R6 (typed errors), R7 (one lease id per attempt), R8 (drain before release), R9 (processes inside send heartbeats),
R10 (fencing tokens grow), R11 (shared poller), R12 (no secrets), R13 (format version),
R14 (deadlocks end), R15 (removed waiters).
"""
