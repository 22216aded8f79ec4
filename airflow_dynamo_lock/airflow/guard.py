"""The guard: code in the process of a task that works under a lease.

Airflow may report a task as ended seconds before its process is dead, so a task's state does not show whether
a process still works under a lease. Therefore each guarded process enters the lease before the task's code
starts, sends heartbeats while the code runs, and leaves when it exits (R8, drain before release; R9,
processes inside send heartbeats). If the lease is lost meanwhile, the guard stops the task.
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
    run_hook,
    runs_in_dag_test,
    task_runner_frame,
)
from airflow_dynamo_lock.client import held as held_variable
from airflow_dynamo_lock.client.clock import monotonic
from airflow_dynamo_lock.core.model.errors import LockError, LockLostError
from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet
from airflow_dynamo_lock.core.model.limits import HEARTBEATS_PER_GRACE
from airflow_dynamo_lock.log import log

if TYPE_CHECKING:
    from airflow_dynamo_lock.client.sync_client import LockClient
    from airflow_dynamo_lock.client.threads import KeepAlive


# Time in seconds from the loss of a lease to the end of the process, if the task does not end by itself.
_STOP_SECONDS = 3.0
# If heartbeats fail, the guard stops the task this share of the grace before the lease ends, or
# `_STOP_SECONDS` before it if that is less. So the task has ended when another holder may acquire the lock.
_STOP_SHARE_OF_GRACE = 0.2
# The stop time has equal steps: at most one for `on_kill`, one after LockLostError, one after each
# LockLostInterrupt.
_STOP_STEPS = 3
# Seconds to wait for a log line to be written. Airflow's logging may block if the supervisor is stuck.
_LOG_SECONDS = 0.2
# Not SIGTERM: Airflow's handler for it only calls `on_kill`.
# Not SIGALRM: Airflow uses it for the execution timeout.
_SIGNAL = signal.SIGUSR2


class LockLostInterrupt(KeyboardInterrupt):
    """Interrupts a task that caught a `LockLostError` and still runs.

    ``except Exception`` does not catch it, and Airflow fails the task for it. It is a `KeyboardInterrupt`
    because libraries handle that one: asyncio ends its loop for it, but treats any other `BaseException` as
    the result of a coroutine.
    """


class Guard:
    """Enters leases for this process, sends their heartbeats, and stops the task if one of them is lost.

    :param client: a client for the lock table.
    :param held: the leases to work under, as the acquiring task received them.
    :param task: the operator whose ``on_kill`` is called when a lease is lost.
    :param acquire_task_id: id of the task that acquired the leases; None if it was this one.
    """

    def __init__(
        self, client: LockClient, held: Iterable[Lease], task: Any, acquire_task_id: str | None = None
    ) -> None:
        self.leases: list[Lease] = []
        self.acquire_task_id = acquire_task_id
        self._client = client
        self._held = LeaseSet(tuple(held))
        self._task = task
        self._pid = os.getpid()
        self._process = f"{socket.gethostname()}:{self._pid}:{uuid.uuid4().hex[:8]}"
        self._thread = threading.current_thread()
        self._runner: FrameType | None = None
        self._heartbeats: list[KeepAlive] = []
        self._lock = threading.Lock()
        self._has_left = False
        self._releases = False
        self._lost: LockLostError | None = None
        self._interruption: BaseException | None = None

    def enter(self) -> None:
        """Enter the leases, and send heartbeats until `leave`, at the latest when the process exits.

        Afterwards `leases` has the entered leases. If one cannot be entered, the process leaves the others.

        :raises LockLostError: a lease is lost or draining, so the task's code must not start.
        """
        self._thread, self._runner = threading.current_thread(), task_runner_frame()
        if self._thread is threading.main_thread():
            signal.signal(_SIGNAL, _on_signal)
        atexit.register(self.leave)
        _active_guards.append(self)
        try:
            for lease in self._held:
                entered = self._client.enter(lease, self._process)
                while entered.remaining() <= _safe_time(entered):
                    # The answer came so late that the task would have to be stopped as soon as it has started.
                    entered = self._client.enter(lease, self._process)
                self.leases.append(entered)
                self._heartbeats.append(self._keep_alive(entered))
        except BaseException:
            self.leave()
            raise

    def show_leases(self, context: Any) -> None:
        """Put the entered leases into the task's context, and into the environment of its child processes.

        :param context: the context. ``dynamo_lock`` becomes the first of the leases; ``dynamo_locks`` has all
            leases by key, with those of the outer groups.
        """
        own = {lease.key: lease for lease in self.leases}
        context["dynamo_locks"] = {**context.get("dynamo_locks", {}), **own}
        context["dynamo_lock"] = self.leases[0]
        os.environ[held_variable.VARIABLE] = held_variable.with_leases(self._client, self.leases)

    def release_on_exit(self) -> None:
        """Let `leave` release the leases: no process may enter them any more."""
        self._releases = True

    def leave(self) -> None:
        """Stop the heartbeats and remove this process from the lock records; release the leases if asked to.

        A second call does nothing, nor does a call in a fork. An error is only logged: it must not replace the task's
        result or exception, and the lease runs out by itself.
        """
        if self._is_fork():
            return
        with self._lock:
            if self._has_left:
                return
            self._has_left = True
        atexit.unregister(self.leave)
        _active_guards.remove(self)
        held_variable.forget(self._held)
        for heartbeats in self._heartbeats:
            heartbeats.stop()
        entered = {lease.key: lease for lease in self.leases}
        # All of `_held`, not only `leases`: an enter whose answer was lost may have been applied.
        for lease in self._held:
            try:
                self._client.leave(entered.get(lease.key, lease), self._process, release=self._releases)
            except LockError as failure:
                log.warning("Could not leave the lock %r, the lease will run out: %s", lease.key, failure)

    def drain(self) -> None:
        """Drain the leases, because Airflow is about to kill this process.

        Each lease ends one grace after this process's last heartbeat. Errors are only logged.
        """
        if self._is_fork():
            return
        for lease in self._held:
            try:
                self._client.release(lease)  # drains the lease, because this process is inside
            except LockError as failure:
                log.warning("Could not drain the lock %r, the lease will run out: %s", lease.key, failure)

    def _keep_alive(self, entered: Lease) -> KeepAlive:
        """Start the heartbeats of an entered lease; it is valid for one grace."""
        grace = entered.lease_ms / 1000
        return self._client.keep_alive(
            entered,
            interval=grace / HEARTBEATS_PER_GRACE,
            on_lost=self._on_lost,
            on_danger=self._on_danger,
            safe_time=_safe_time(entered),
        )

    def _is_fork(self) -> bool:
        """Whether this process is a fork of the guarded one. A fork must not leave or release leases."""
        return os.getpid() != self._pid

    def _is_task_running(self) -> bool:
        """Whether the task's own code runs. Airflow's code that reports its end must not be interrupted."""
        if self._has_left or self._is_fork():
            return False
        return self._runner is None or not has_ended(self._runner)

    # -- when a lease is lost -------------------------------------------------------------------------------

    def _on_danger(self, lease: Lease, left: float) -> None:
        """Give the lease up and stop the task within the remaining `left` seconds, because heartbeats fail.

        Called in the thread that monitors the lease.
        """
        assert lease.term
        lease.term.lose("no heartbeat has succeeded in time")
        try:
            lease.check()
        except LockLostError as lost:
            self._stop(lost, left)

    def _on_lost(self, lease: Lease, lost: LockLostError) -> None:
        """Stop the task: the record shows that the lease is gone, or the process was paused for too long.

        Called in the thread that sends the heartbeats.
        """
        self._stop(lost, _STOP_SECONDS)

    def _stop(self, lost: LockLostError, seconds: float) -> None:
        """Call ``on_kill`` and interrupt the task. If it still runs after `seconds`, end the process."""
        with self._lock:
            if self._lost is not None:
                return  # the loss of another lease already stops the task
            self._lost = lost
        deadline, step = monotonic() + seconds, seconds / _STOP_STEPS
        if not self._is_task_running():
            return
        _call_with_timeout(_LOG_SECONDS, lambda: log.error("%s Stopping the task.", lost))
        _call_with_timeout(step, self._task.on_kill)
        interruption: BaseException = lost
        while self._is_task_running() and (now := monotonic()) < deadline:
            self._interrupt(interruption, until=min(deadline, now + step))
            interruption = LockLostInterrupt(
                f"LockLostError: {lost} The task caught that error and still runs."
            )
        if self._is_task_running():
            _call_with_timeout(
                _LOG_SECONDS, lambda: log.error("%s The task did not end. Ending its process.", lost)
            )
            end_process()

    def _interrupt(self, interruption: BaseException, until: float) -> None:
        """Raise `interruption` in the task's code. Return when the task has ended, or at the time `until`."""
        self._interruption = interruption
        while self._is_task_running() and monotonic() < until:
            # Repeat the signal: the handler does not raise while the task sends a request to the supervisor.
            if self._interruption is not None and self._can_signal():
                signal.pthread_kill(threading.main_thread().ident or 0, _SIGNAL)
            time.sleep(0.05)

    def _can_signal(self) -> bool:
        """Whether the task runs in the main thread, which handles signals, with our handler in place."""
        return self._thread is threading.main_thread() and signal.getsignal(_SIGNAL) is _on_signal

    def _raise_interruption(self, frame: Any) -> None:
        """Raise the pending interruption, if there is one. Called in the signal handler.

        :param frame: the frame of the main thread that the signal interrupted.
        """
        if self._interruption is None or not self._is_task_running() or is_talking_to_supervisor(frame):
            return
        interruption, self._interruption = self._interruption, None
        raise interruption


def _safe_time(entered: Lease) -> float:
    """Seconds before the end of an entered lease at which the guard begins to stop the task, if heartbeats fail."""
    return min(_STOP_SECONDS, _STOP_SHARE_OF_GRACE * entered.lease_ms / 1000)


# The guards of this process that have entered and not left.
_active_guards: list[Guard] = []


def active_guard(acquire_task_id: str) -> Guard | None:
    """The guard of this process that has entered the leases of that task; None if there is none."""
    return next((guard for guard in _active_guards if guard.acquire_task_id == acquire_task_id), None)


def _on_signal(_: int, frame: Any) -> None:
    for guard in list(_active_guards):
        guard._raise_interruption(frame)


def _call_with_timeout(seconds: float, call: Callable[[], None]) -> None:
    """Call a function in another thread, and wait at most `seconds` for it to return."""
    thread = threading.Thread(target=call, name="dynamo-lock guard", daemon=True)
    thread.start()
    thread.join(seconds)


def leave_ended_tasks(ti: Any = None) -> None:
    """In a ``dag.test()``, leave the leases of tasks that have ended. Elsewhere, do nothing.

    A ``dag.test()`` runs all tasks one after the other in one process, which does not exit after each task.

    :param ti: the task instance that is about to start, whose own guards do not leave. With None, all guards
        leave.
    """
    if runs_in_dag_test():
        for guard in list(_active_guards):
            if ti is None or guard._task is not ti.task:
                guard.leave()


class EnterLease:
    """The ``pre_execute`` of a guarded task. It enters the acquire task's leases, or fails the task.

    :param acquire_task_id: id of the task that acquired the leases.
    :param dynamo_lock_conn_id: id of the ``dynamo_lock`` connection; may be a template.
    :param mapped: whether the group is in a mapped task group, so that the acquire task has the map index of
        this task.
    :param then: the task's own ``pre_execute``, which is called last; None if it has none.
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
        guard = Guard(DynamoLockHook(conn_id).get_conn(), held, ti.task, self.acquire_task_id)
        try:
            guard.enter()
        except LockLostError:
            log.error("Only %r acquires the lock again: clear it too.", self.acquire_task_id)
            raise
        guard.show_leases(context)
        if self.then is not None:
            run_hook(self.then, context)
