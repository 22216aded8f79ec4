"""All operations of one process on the locks of one table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from airflow_dynamo_lock.core.effects import Stamp
from airflow_dynamo_lock.core.liveness import Observer
from airflow_dynamo_lock.core.lock.acquire import Acquiring
from airflow_dynamo_lock.core.lock.admin import Admin
from airflow_dynamo_lock.core.lock.attempt import Attempting
from airflow_dynamo_lock.core.lock.confirm import Confirming
from airflow_dynamo_lock.core.lock.release import Releasing
from airflow_dynamo_lock.core.lock.renew import Renewing
from airflow_dynamo_lock.core.lock.requests import Requests
from airflow_dynamo_lock.core.queue.queue import WaitQueue
from airflow_dynamo_lock.core.table.format import Format


@dataclass(frozen=True)
class Operations:
    """All operations.

    They guarantee that holders with a valid lease (`Term`) never have more slots together than the lock's capacity, as
    long as clocks keep the bounds that `core.liveness` names. They cannot stop a process that is suspended between
    checking its lease and writing to the resource: that is what the fencing token is for.
    """

    requests: Requests
    renewing: Renewing
    releasing: Releasing
    attempting: Attempting
    acquiring: Acquiring
    admin: Admin

    @classmethod
    def of(
        cls, table_format: Format, stamp: Callable[[], Stamp], observer: Observer, queue: WaitQueue
    ) -> Operations:
        """The operations of one process.

        :param observer: remembers the holders that the process has seen.
        :param queue: the queues, and the entries of the process.
        """
        requests = Requests(table_format, stamp)
        renewing = Renewing(requests)
        releasing = Releasing(requests, renewing)
        attempting = Attempting(requests, releasing, Confirming(requests, observer), observer, queue)
        acquiring = Acquiring(requests, attempting, observer, queue)
        return cls(requests, renewing, releasing, attempting, acquiring, Admin(requests, observer, queue))
