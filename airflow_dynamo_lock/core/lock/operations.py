"""The operations on the locks of one table, as one process performs them."""

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
    """All of them. What holds: at no time do holders that still count on their lease (`Term`) have more slots than the
    lock's capacity, if the clocks keep the bounds that `core.liveness` names. What does not hold: nothing can stop a
    process that is paused between looking at its lease and writing to the resource; the fencing token is for that.
    """

    requests: Requests
    renewing: Renewing
    releasing: Releasing
    attempting: Attempting
    acquiring: Acquiring
    admin: Admin

    @classmethod
    def of(
        cls, format: Format, stamp: Callable[[], Stamp], observer: Observer, queue: WaitQueue
    ) -> Operations:
        """The operations of a process.

        :param observer: what the process has seen of holders.
        :param queue: the queues, and the process's entries in them.
        """
        requests = Requests(format, stamp)
        renewing = Renewing(requests)
        releasing = Releasing(requests, renewing)
        attempting = Attempting(requests, releasing, Confirming(requests, observer), observer, queue)
        acquiring = Acquiring(requests, attempting, observer, queue)
        return cls(requests, renewing, releasing, attempting, acquiring, Admin(requests, observer))
