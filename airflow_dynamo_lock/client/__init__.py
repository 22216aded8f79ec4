"""The two clients: they run the operations of `core` on boto3 (`LockClient`) and on aiobotocore (`AsyncLockClient`).

- `session` turns arguments into operations and outcomes into leases, once for both; `claims`, `leases`,
  `administration` and `options` are its parts.
- `threads` and `tasks` carry out the effects of operations, and run the background work: heartbeats, poller, queue
  entries. They decide nothing about locks.
- `_async` has the methods of both clients. scripts/facades.py generates `_sync` from it.
- `sdk` translates between the SDK and `core`; `sdk_methods` refuses a wrong SDK client; `clock` is the clock of all.

An operation is a generator that yields effects (a request, a sleep, a wait) and returns an outcome: see `core.effects`.
The rules R1 to R14 are listed in `core`.
"""
