"""A complete Airflow deployment on this machine, to run DAGs in: for the demo and for tests in real Airflow.

    with Deployment("north", home=tmp_path / "north", dags=Path("dags")) as north:
        north.wait_for_dags({"orders"})
        run = north.wait("orders", north.trigger("orders"))

Everything is Airflow's own: API server, scheduler (with LocalExecutor), DAG processor and triggerer, each a
process that can be killed, paused and started again by itself, on a database in `home`. They listen on
127.0.0.1 only. Several deployments can run side by side, and come up together in `running(north, south)`.
Leaving the context leaves no process behind, and neither does the death of the process that entered it.
"""

from __future__ import annotations

import json
import os
import pwd
import re
import secrets
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Self

import httpx
import psutil

from deployments import processes
from deployments.airflow_client import AirflowClient, AirflowError

GRACE = 3.0  # seconds from SIGTERM to SIGKILL; only a triggerer takes longer, and much longer
# The supervisor of a task's process, in the log of the component that runs it.
_FINISHED = re.compile(
    r"(?:Task|Workload) finished .*\bduration=([\d.]+)(?:.*\b(?:task_instance|workload)_id=([\w-]+))?"
)
HEALTHY = 180.0  # seconds to come up, at most; 2 cores that are shared with another deployment need about 30


class Component:
    """One of the processes that make up a deployment, in a session of its own with those that it starts."""

    def __init__(
        self,
        name: str,
        command: list[str],
        environment: Mapping[str, str],
        log: Path,
        account: pwd.struct_passwd | None = None,
    ) -> None:
        self.name = name
        self._account = account
        self.log = log
        self.started = datetime.max.replace(tzinfo=UTC)
        self._command = command
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None
        self._orphaned: list[subprocess.Popen[bytes]] = []  # dead leaders whose sessions may still live

    def start(self) -> None:
        """Start it, which must not be running. Its output goes to the end of `log`."""
        assert not self.is_running, f"{self.name} is running"
        self.started = datetime.now(UTC)
        if self._process:
            self._orphaned.append(self._process)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                user=self._account and self._account.pw_uid,
                group=self._account and self._account.pw_gid,
            )

    def kill(self) -> None:
        """End it as a power failure would: SIGKILL to it and to all that it has started, tasks included."""
        self._end(grace=0.0)

    def kill_leader(self) -> None:
        """End its main process alone, as a machine without memory might. What that has started goes on by itself, even
        past the next start, until `kill()` or `stop()`."""
        assert self._process, f"{self.name} is not running"
        # Not by Popen.kill(): see `is_running`.
        os.kill(self._process.pid, signal.SIGKILL)

    def stop(self, grace: float = GRACE) -> None:
        """End it in good order, with all it has started; what is left after `grace` seconds is killed."""
        self._end(grace)

    def restart(self) -> None:
        """Kill it and start it again."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Stop its clock, and that of all it has started, as a suspended machine would (SIGSTOP)."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Go on after `pause()`."""
        self._signal(signal.SIGCONT)

    def processes(self) -> list[psutil.Process]:
        """The living processes of its sessions."""
        return processes.of_sessions(self.sessions)

    @property
    def sessions(self) -> list[int]:
        """The ids of its session, which is the pid of its leader, and of those whose leader was killed alone."""
        return [each.pid for each in (self._process, *self._orphaned) if each]

    @property
    def is_running(self) -> bool:
        """Whether the leader lives."""
        # Not by Popen.poll(): it collects a dead leader, whose pid could then become another session's id.
        return bool(self._process) and psutil.Process(self.sessions[0]).status() != psutil.STATUS_ZOMBIE

    def wait(self) -> int | None:
        """Wait until the leader has ended, and return its exit code; None if there is none to wait for."""
        code = self._process.wait() if self._process else None
        while self._orphaned:
            self._orphaned.pop().wait()
        self._process = None
        return code

    def tail(self, lines: int = 20) -> str:
        """The end of its log."""
        if not self.log.exists():
            return ""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def _end(self, grace: float) -> None:
        processes.end(self.processes, grace)
        self.wait()

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes():
            with suppress(psutil.NoSuchProcess):
                process.send_signal(number)


class Deployment(AirflowClient):
    """An Airflow of its own in `home`, with the DAGs in `dags`; once it is up, also its own REST client.

    Nothing of the caller's environment reaches it except PATH and TMPDIR; `env` adds to it, connections for
    example (`AIRFLOW_CONN_…`) and configuration (`AIRFLOW__…`).
    """

    def __init__(
        self,
        name: str,
        home: Path,
        dags: Path,
        *,
        env: Mapping[str, str] | None = None,
        parallelism: int = 4,
    ) -> None:
        self.name = name
        self.home = home.absolute()
        self.port = free_port()
        self.status = "not started"
        super().__init__(f"http://127.0.0.1:{self.port}", "admin", secrets.token_urlsafe(9))
        self._environment = self._base_environment(dags.absolute(), parallelism) | dict(env or {})

        self._migration = self.component("db-migrate", "db", "migrate")
        self.api_server = self.component("api-server")
        # Airflow's log servers would listen on all addresses, and all logs are on this disk anyway.
        self.scheduler = self.component("scheduler", "scheduler", "--skip-serve-logs")
        self.dag_processor = self.component("dag-processor")
        self.triggerer = self.component("triggerer", "triggerer", "--skip-serve-logs")
        self.components: tuple[Component, ...] = (
            self.api_server,
            self.scheduler,
            self.dag_processor,
            self.triggerer,
        )
        self._reaper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._context = running(self)
        self._context.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._context.__exit__(kind, error, traceback)

    def prepare(self) -> None:
        """First step up: begin to create the home and the database."""
        self.status = "creating its database"
        self.make_home()
        self._migration.start()

    def make_home(self) -> None:
        """Create the home, and begin to watch over it."""
        (self.home / "output").mkdir(parents=True)
        self._reaper = subprocess.Popen(
            [sys.executable, processes.__file__, str(self.home)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        # Airflow generates the password only if there is none.
        (self.home / "simple_auth_manager_passwords.json.generated").write_text(
            json.dumps({self.username: self.password})
        )

    def launch(self) -> None:
        """Second step up: when the database is there, start the components."""
        if self._migration.wait() != 0:
            raise AirflowError(f"{self.name}: no database:\n{self._migration.tail()}")
        self.tune_database()
        for component in self.components:
            component.start()

    def tune_database(self) -> None:
        """Set up the database before anything but its migration has used it."""
        with sqlite3.connect(self.home / "airflow.db") as database:
            database.execute("PRAGMA journal_mode = WAL")  # so that readers do not wait for writers
        database.close()

    def wait_until_healthy(self, timeout: float = HEALTHY) -> None:
        """Last step up, or after starting a component again: wait until each has beaten since its start."""
        deadline = time.monotonic() + timeout
        while waiting_for := self._unhealthy():
            self.status = f"waiting for {', '.join(component.name for component in waiting_for)}"
            dead = [component for component in self.components if not component.is_running]
            if dead or time.monotonic() > deadline:
                what = "dead" if dead else f"not healthy after {timeout:g} s"
                tails = "".join(f"\n--- {c.name}: {c.log}\n{c.tail()}" for c in dead or waiting_for)
                raise AirflowError(f"{self.name}: {what}:{tails}")
            time.sleep(0.25)
        self.status = "up"

    def stop(self) -> None:
        """End everything that belongs to this deployment, whatever state it is in."""
        self.status = "stopping"
        processes.end(self.processes, GRACE)
        for component in (self._migration, *self.components):
            component.wait()
        if self._reaper:
            self._reaper.communicate()
        self.close()
        self.status = "stopped"

    def processes(self) -> list[psutil.Process]:
        """All living processes of this deployment."""
        sessions = [session for component in self.components for session in component.sessions]
        return processes.of_home(self.home, sessions)

    def ended_processes(self) -> list[tuple[str, float]]:
        """The ended processes of tasks: task instance id, and for how many seconds each occupied a worker slot.

        Airflow 3.0 logs no id: it is empty there. Airflow logs the end of a process up to five seconds after it.
        """
        logs = [component.log for component in self.components if component.log.exists()]
        found = [_FINISHED.findall(log.read_text(errors="replace")) for log in logs]
        return [(ti, float(seconds)) for each in found for seconds, ti in each]

    def component(self, name: str, *command: str) -> Component:
        """One of Airflow's own commands."""
        return self.server(name, sys.executable, "-m", "airflow", *(command or [name]))

    def server(self, name: str, *command: str, account: pwd.struct_passwd | None = None) -> Component:
        """Any program that belongs to the deployment."""
        return Component(name, [*command], self._environment, self.home / "output" / f"{name}.log", account)

    def _unhealthy(self) -> list[Component]:
        """The components without a heartbeat since their start."""
        try:
            health = self.health()
        except httpx.TransportError:
            return list(self.components)
        heartbeats = {
            self.scheduler: health["scheduler"]["latest_scheduler_heartbeat"],
            self.triggerer: health["triggerer"]["latest_triggerer_heartbeat"],
            self.dag_processor: health["dag_processor"]["latest_dag_processor_heartbeat"],
        }
        return [
            component
            for component, heartbeat in heartbeats.items()
            if heartbeat is None or datetime.fromisoformat(heartbeat) < component.started
        ]

    def _base_environment(self, dags: Path, parallelism: int) -> dict[str, str]:
        passed_on = {name: os.environ[name] for name in ("TMPDIR",) if name in os.environ}
        return passed_on | {
            # The tools of this Python's environment first.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            # A home without ~/.aws and the like, and no asking a cloud's metadata service for credentials.
            "HOME": str(self.home),
            "AWS_EC2_METADATA_DISABLED": "true",
            "LANG": "C.UTF-8",
            "AIRFLOW_HOME": str(self.home),
            # Else titles are written over the environment by which `processes` tells whose a process is.
            "SPT_NOENV": "1",
            "AIRFLOW__API__BASE_URL": self.url,
            # So that an answer says what went wrong, and not a log alone.
            "AIRFLOW__API__EXPOSE_STACKTRACE": "True",
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__PORT": str(self.port),
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
            "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{self.url}/execution/",
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__PARALLELISM": str(parallelism),
            "AIRFLOW__DAG_PROCESSOR__PARSING_PROCESSES": "1",
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "5",
            # Else a machine that stands still for a minute has its DAGs removed.
            "AIRFLOW__DAG_PROCESSOR__STALE_DAG_THRESHOLD": "600",
            "AIRFLOW__LOGGING__COLORED_CONSOLE_LOG": "False",
            # Else a task fails whose process waits more than 5 s for the API server of a busy machine.
            "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": "60",
            "NO_PROXY": "127.0.0.1",
        }


@contextmanager
def running(*deployments: Deployment) -> Iterator[None]:
    """Have several deployments up, started and stopped side by side."""
    try:
        for deployment in deployments:
            deployment.prepare()
        for deployment in deployments:
            deployment.launch()
        for deployment in deployments:
            deployment.wait_until_healthy()
        yield
    finally:
        with processes.undisturbed():
            processes.end(lambda: [process for each in deployments for process in each.processes()], GRACE)
            for deployment in deployments:
                deployment.stop()


def free_port() -> int:
    """A port on 127.0.0.1 that the operating system will not give to anyone for the next minute.

    It has just had a connection, whose end the kernel remembers (TIME_WAIT); only a server may still take it,
    with SO_REUSEADDR. A port that was merely free a moment ago may be another connection's by the time
    Airflow listens.
    """
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        server.accept()[0].close()
        return int(server.getsockname()[1])
