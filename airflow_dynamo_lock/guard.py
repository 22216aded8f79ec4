"""What stands between a lease and the code that works under it (rules R8 and R9), in the task's own process.

Task states tell nothing about processes: Airflow may call a task failed, or successful, seconds before its process is
dead. So each guarded process notes in the lock record that it is inside before the task's code starts, beats while it
runs, and notes that it has left when it exits. If the lease is lost meanwhile, the task is stopped.
"""

from __future__ import annotations

import atexit
import logging
import os
import signal
import socket
import threading
import uuid
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from airflow_dynamo_lock import leases
from airflow_dynamo_lock.compat import is_talking_to_supervisor, runs_in_dag_test
from airflow_dynamo_lock.protocol.errors import LockError, LockLostError
from airflow_dynamo_lock.protocol.model import Lease

if TYPE_CHECKING:
    from airflow_dynamo_lock.client.sync import KeepAlive, LockClient

log = logging.getLogger("airflow_dynamo_lock")

#: Beats of a guarded process in one release grace (rule R9).
BEATS_PER_GRACE = 3
# How long a lost task's on_kill may take before its main thread is interrupted all the same, in seconds.
_ON_KILL_WITHIN = 2.0
# Not SIGTERM, which Airflow answers with on_kill alone, and not SIGALRM, which is its execution timeout.
_SIGNAL = signal.SIGUSR2


class Guard:
    """Keeps this process inside some leases, and its task out of trouble.

    :param held: the leases to work under, as the acquiring task got them.
    :param task: the operator whose ``on_kill`` is called when a lease is lost.
    """

    def __init__(self, client: LockClient, held: Iterable[Lease], task: Any) -> None:
        self.leases: list[Lease] = []
        self._client = client
        self._held = list(held)
        self._task = task
        self._process = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._beats: list[KeepAlive] = []
        self._lock = threading.Lock()
        self._left = False
        self._lost: LockLostError | None = None
        self._interrupted = threading.Event()

    def enter(self) -> None:
        """Note that this process is inside, and beat from now on until it leaves, at its exit at the latest.

        :raises LockLostError: a lease is lost or ending; the task's code must not start.
        """
        if threading.current_thread() is threading.main_thread():
            signal.signal(_SIGNAL, self._on_signal)
        atexit.register(self.leave)
        _here.append(self)
        try:
            for lease in self._held:
                entered = self._client.enter(lease, self._process)
                self.leases.append(entered)
                interval = entered.lease_ms / 1000 / BEATS_PER_GRACE
                self._beats.append(self._client.keep_alive(entered, interval=interval, on_lost=self._on_lost))
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Note that this process has left. Done once; what cannot be written now runs out by itself."""
        with self._lock:
            if self._left:
                return
            self._left = True
        atexit.unregister(self.leave)
        _here.remove(self)
        for beat in self._beats:
            beat.stop()
        # All that it may have entered, also where the answer never came.
        for lease in self._held:
            try:
                self._client.leave(lease, self._process)
            except LockError as failure:
                log.warning("Could not leave the lock %r, the lease will run out: %s", lease.key, failure)

    def abandon(self) -> None:
        """Let the leases end a grace after this process's last beat: it is about to be killed."""
        for lease in self._held:
            try:
                self._client.give_back(lease)
            except LockError as failure:
                log.warning("Could not abandon the lock %r, the lease will run out: %s", lease.key, failure)

    def _on_lost(self, lease: Lease, lost: LockLostError) -> None:
        """In the heartbeat's thread: stop the task."""
        self._lost = lost
        log.error("%s Stopping the task.", lost)
        killer = threading.Thread(target=self._task.on_kill, name="dynamo-lock on_kill", daemon=True)
        killer.start()
        killer.join(_ON_KILL_WITHIN)
        while not self._left and not self._interrupted.wait(0.05):
            # Again until it came through: a request to the supervisor must not be cut in two.
            signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)

    def _on_signal(self, _: int, frame: Any) -> None:
        if self._left or self._lost is None or is_talking_to_supervisor(frame):
            return
        self._interrupted.set()
        raise self._lost


_here: list[Guard] = []


def leave_ended_tasks(ti: Any = None) -> None:
    """In a ``dag.test()``, where one process runs all tasks in turn, leave on behalf of those that have ended.

    :param ti: the task instance that starts now, whose own guards stay.
    """
    if runs_in_dag_test():
        for guard in list(_here):
            if ti is None or guard._task is not ti.task:
                guard.leave()


class EnterLock:
    """The ``pre_execute`` of a guarded task: enters the lease of the group's acquire task, or fails the task.

    :param acquire_task_id: the task that acquired the lease.
    :param mapped: that task has the same map index as the guarded one, not -1.
    :param then: the task's own ``pre_execute``.
    """

    def __init__(
        self,
        acquire_task_id: str,
        dynamo_lock_conn_id: str,
        *,
        mapped: bool,
        then: Callable[[Any], None] | None,
    ) -> None:
        self.acquire_task_id = acquire_task_id
        self.dynamo_lock_conn_id = dynamo_lock_conn_id
        self.mapped = mapped
        self.then = then

    def __call__(self, context: Any) -> None:
        from airflow_dynamo_lock.hooks import DynamoLockHook

        ti = context["ti"]
        leave_ended_tasks(ti)
        result = ti.xcom_pull(task_ids=self.acquire_task_id, map_indexes=ti.map_index if self.mapped else -1)
        held = leases.from_result(result, self.acquire_task_id)
        conn_id = ti.task.render_template(self.dynamo_lock_conn_id, context)
        guard = Guard(DynamoLockHook(conn_id).get_conn(), held, ti.task)
        guard.enter()
        show_leases(context, guard.leases)
        if self.then is not None:
            self.then(context)


def show_leases(context: Any, held: list[Lease]) -> None:
    """Put the leases into the task's context: ``dynamo_lock``, the innermost one, and ``dynamo_locks``, all by key."""
    context["dynamo_locks"] = {**context.get("dynamo_locks", {}), **{lease.key: lease for lease in held}}
    context["dynamo_lock"] = held[0]
