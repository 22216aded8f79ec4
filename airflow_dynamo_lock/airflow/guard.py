"""What stands between a lease and the code that works under it (rules R8 and R9), in the task's own process.

Task states tell nothing about processes: Airflow may call a task failed, or successful, seconds before its process is
dead. So each guarded process notes in the lock record that it is inside before the task's code starts, beats while it
runs, and notes that it has left when it exits. If the lease is lost meanwhile, the task is stopped.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable
from types import FrameType
from typing import TYPE_CHECKING, Any

from airflow_dynamo_lock.airflow import lock_options
from airflow_dynamo_lock.airflow.versions import (
    end_process,
    has_ended,
    is_talking_to_supervisor,
    running_task,
    runs_in_dag_test,
)
from airflow_dynamo_lock.client.clock import monotonic
from airflow_dynamo_lock.core.model.errors import LockError, LockLostError
from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet
from airflow_dynamo_lock.log import log

if TYPE_CHECKING:
    from airflow_dynamo_lock.client.sync_client import LockClient
    from airflow_dynamo_lock.client.threads import KeepAlive


#: Beats of a guarded process in one release grace (rule R9).
BEATS_PER_GRACE = 3
# Seconds that a task has to end after its lease is lost, before the guard ends its process. A task that is cut off from
# DynamoDB is stopped that much sooner, or a fifth of the grace if that is less, so that it ends before the lease does.
_STOP_WITHIN, _STOP_SHARE = 3.0, 0.2
# The parts of that time: for on_kill, for the task after LockLostError, and between further interruptions.
_STOP_STEPS = 3
# Seconds that the log may take: it waits for Airflow's supervisor, which may be stuck.
_LOG_WITHIN = 0.2
# Not SIGTERM, which Airflow answers with on_kill alone, and not SIGALRM, which is its execution timeout.
_SIGNAL = signal.SIGUSR2


class LockLostInterrupt(KeyboardInterrupt):
    """Interrupts a task that goes on after a `LockLostError`.

    ``except Exception`` does not catch it, Airflow fails the task for it, and libraries know how to handle it: asyncio
    ends its loop for a `KeyboardInterrupt`, but takes any other `BaseException` for the result of a coroutine.
    """


class Guard:
    """Keeps this process inside some leases, and stops its task when one of them is lost.

    :param held: the leases to work under, as the acquiring task got them.
    :param task: the operator whose ``on_kill`` is called when a lease is lost.
    """

    def __init__(self, client: LockClient, held: Iterable[Lease], task: Any) -> None:
        self.leases: list[Lease] = []
        self._client = client
        self._held = LeaseSet(tuple(held))
        self._task = task
        self._pid = os.getpid()
        self._process = f"{socket.gethostname()}:{self._pid}:{uuid.uuid4().hex[:8]}"
        self._thread = threading.current_thread()
        self._runner: FrameType | None = None
        self._beats: list[KeepAlive] = []
        self._lock = threading.Lock()
        self._left = False
        self._lost: LockLostError | None = None
        self._interruption: BaseException | None = None

    def enter(self) -> None:
        """Note that this process is inside, and beat from now on until it leaves, at its exit at the latest.

        :raises LockLostError: a lease is lost or draining; the task's code must not start.
        """
        self._thread, self._runner = threading.current_thread(), running_task()
        if self._thread is threading.main_thread():
            signal.signal(_SIGNAL, _on_signal)
        atexit.register(self.leave)
        _here.append(self)
        try:
            for lease in self._held:
                entered = self._client.enter(lease, self._process)
                self.leases.append(entered)
                seconds = entered.lease_ms / 1000
                beats = self._client.keep_alive(
                    entered,
                    interval=seconds / BEATS_PER_GRACE,
                    on_lost=self._on_lost,
                    on_danger=self._on_danger,
                    safe_time=min(_STOP_WITHIN, _STOP_SHARE * seconds),
                )
                self._beats.append(beats)
        except BaseException:
            self.leave()
            raise

    def leave(self) -> None:
        """Note that this process has left. Done once; what cannot be written now runs out by itself."""
        if self._is_fork():
            return
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

    def release(self) -> None:
        """Release the leases. Whatever the task has returned or raised counts for more than a failure to do so."""
        if self._is_fork():
            return
        try:
            self._client.release(self._held)
        except LockError as failure:
            log.warning("Could not release the lock %s, it will run out: %s", self._held, failure)

    def abandon(self) -> None:
        """Let the leases end a grace after this process's last beat: it is about to be killed."""
        if self._is_fork():
            return
        for lease in self._held:
            try:
                self._client.release(lease)
            except LockError as failure:
                log.warning("Could not abandon the lock %r, the lease will run out: %s", lease.key, failure)

    def _is_fork(self) -> bool:
        """Whether this process is a fork of the one that entered, for which it must not leave or release anything."""
        return os.getpid() != self._pid

    def _is_working(self) -> bool:
        """Whether the task's code runs. Airflow's own code, which reports the task's end, must not be interrupted."""
        return not (self._left or self._is_fork() or (self._runner is not None and has_ended(self._runner)))

    # -- when a lease is lost -----------------------------------------------------------------------------------

    def _on_danger(self, lease: Lease, left: float) -> None:
        """In the monitor's thread: no heartbeat has succeeded, and only `left` seconds remain to stop the task."""
        assert lease.term
        lease.term.lose("no heartbeat has succeeded in time")
        try:
            lease.check()
        except LockLostError as lost:
            self._stop(lost, left)

    def _on_lost(self, lease: Lease, lost: LockLostError) -> None:
        """In the heartbeat's thread: the lease was taken away, or the process was stopped for too long."""
        self._stop(lost, _STOP_WITHIN)

    def _stop(self, lost: LockLostError, within: float) -> None:
        """Stop the task, whatever it catches; if it does not end in time, end the process."""
        with self._lock:
            if self._lost is not None:
                return
            self._lost = lost
        deadline, step = monotonic() + within, within / _STOP_STEPS
        if not self._is_working():
            return
        _spend(_LOG_WITHIN, lambda: log.error("%s Stopping the task.", lost))
        _spend(step, self._task.on_kill)
        interruption: BaseException = lost
        while self._is_working() and (now := monotonic()) < deadline:
            self._interrupt(interruption, min(deadline, now + step))
            interruption = LockLostInterrupt(f"LockLostError: {lost} The task caught that and went on.")
        if self._is_working():
            _spend(_LOG_WITHIN, lambda: log.error("%s The task did not end. Ending its process.", lost))
            end_process()

    def _interrupt(self, interruption: BaseException, until: float) -> None:
        """Raise an exception in the task's code, and wait for the task to end."""
        self._interruption = interruption
        while self._is_working() and monotonic() < until:
            # Only Python's main thread handles signals, and the task may have replaced the handler. Where it is ours,
            # signal until it has raised: it does not while the task talks to Airflow's supervisor.
            if (
                self._interruption is not None
                and self._thread is threading.main_thread()
                and signal.getsignal(_SIGNAL) is _on_signal
            ):
                signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)
            time.sleep(0.05)

    def _raise(self, frame: Any) -> None:
        """In a signal handler, which was called in `frame` of the main thread: raise the interruption, if any."""
        if self._interruption is None or not self._is_working() or is_talking_to_supervisor(frame):
            return
        interruption, self._interruption = self._interruption, None
        raise interruption


_here: list[Guard] = []


def _on_signal(_: int, frame: Any) -> None:
    for guard in list(_here):
        guard._raise(frame)


def _spend(seconds: float, call: Callable[[], None]) -> None:
    """Call a function in another thread, and wait for it no longer than that."""
    thread = threading.Thread(target=call, name="dynamo-lock guard", daemon=True)
    thread.start()
    thread.join(seconds)


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
        from airflow_dynamo_lock.airflow.hooks import DynamoLockHook

        ti = context["ti"]
        leave_ended_tasks(ti)
        result = ti.xcom_pull(task_ids=self.acquire_task_id, map_indexes=ti.map_index if self.mapped else -1)
        held = lock_options.from_result(result, self.acquire_task_id)
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
