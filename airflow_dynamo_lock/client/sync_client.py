"""`LockClient`: the lock on boto3, with threads."""

from __future__ import annotations

from airflow_dynamo_lock.client._sync.leases import Leases
from airflow_dynamo_lock.client._sync.tables import Table


class LockClient(Leases, Table):
    """Locks in one DynamoDB table. Safe to share between threads, and to use on both sides of a fork: the fork holds
    nothing, and releases nothing for its parent.

    :param client: a boto3 DynamoDB client; make it with ``config=sdk_config()``, so that a dead network is noticed
        within seconds.
    :param table: the lock table's name.
    :param owner: the holder's name, for people to read, of 1 to 1,024 bytes. Default ``host:pid``.
    :param lease: how long a lease lasts after its last heartbeat, in seconds; at least 0.1.
    :param heartbeat: seconds between background heartbeats. Default a sixth of the lease.
    :param release_grace: how long a lease lasts after its release while processes are inside, in seconds; at least
        0.1.
    :param max_clock_skew: 5 s more than the clocks of two DynamoDB servers may differ, in seconds (R3, proof of death).
    :param table_format: ``native``, or the format of another lock library, with whose clients the locks are then
        shared (docs/formats.md). With ``s3``, `client` is an S3 client, and `table` a bucket.
    :param partition_key: the name of a foreign table's partition key, if not its library's default.
    :param sort_key: the name of a foreign table's sort key, if not its library's default.
    :param streams: a boto3 ``dynamodbstreams`` client. If it can read the table's stream, waiters notice a release
        sooner than by their next read. At most two processes per table should read the stream, because DynamoDB
        throttles more.
    :raises LockValueError: an argument that can never work.

    Every method may raise `LockUnavailableError` (network, throttling), `LockAccessError` (permissions, credentials)
    and `LockTableError` (no such table, other keys, a damaged record, or one of a newer version).
    """
