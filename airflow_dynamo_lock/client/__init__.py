"""The wire: runs the protocol's operations on boto3 (`LockClient`) and on aiobotocore (`AsyncLockClient`).

`core` turns arguments into operations and outcomes into leases, once for both; `sync` and `aio` carry effects out, with
threads and with asyncio; `wire` translates between the SDK's answers and the protocol's; `clock` is the clock of all.
"""
