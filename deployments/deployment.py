"""A complete Airflow deployment on this machine, in which the demo, the tests and the benchmarks run DAGs.

    with Deployment("north", home=tmp_path / "north", dags=Path("dags")) as north:
        north.wait_for_dags({"orders"})
        run = north.wait("orders", north.trigger("orders"))

It consists of an API server, a scheduler with LocalExecutor, a DAG processor and a triggerer. Each is a
process that can be killed, paused and started again on its own. Their database is in `home`, and they listen
on 127.0.0.1 only.

Several deployments can run at the same time; `running(north, south)` starts them together. All their
processes end with the `with` block, or when the process that entered it dies.
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

GRACE = 3.0  # seconds from SIGTERM to SIGKILL; only a triggerer needs more, and it may need very long
# The supervisor of a task's process writes this line to the log of the component that runs it.
_FINISHED = re.compile(
    r"(?:Task|Workload) finished .*\bduration=([\d.]+)(?:.*\b(?:task_instance|workload)_id=([\w-]+))?"
)
HEALTHY = 180.0  # maximum start time in seconds; two deployments that start on 2 cores need about 30


class Component:
    """A process of a deployment, such as the scheduler, which leads a session of its own.

    Methods that end or pause it do so with all processes in its session, except `kill_leader`.

    :param log: file to which the output is appended.
    :param account: run the component as this user; None for the current user.
    """

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
        # Dead session leaders, not yet collected: their pids must stay in use while their sessions may live.
        self._orphaned: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the component, which must not be running."""
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
        """Send SIGKILL to all processes in the session, as a power failure would end them."""
        self._end(grace=0.0)

    def kill_leader(self) -> None:
        """Send SIGKILL to the session leader only, as the kernel does when memory runs out.

        The leader's children run on, even after the next start, until `kill` or `stop`.
        """
        assert self._process, f"{self.name} is not running"
        # Popen.kill() calls poll(): see `is_running`.
        os.kill(self._process.pid, signal.SIGKILL)

    def stop(self, grace: float = GRACE) -> None:
        """End the processes in the session with SIGTERM, and with SIGKILL after `grace` seconds."""
        self._end(grace)

    def restart(self) -> None:
        """Kill the component and start it again."""
        self.kill()
        self.start()

    def pause(self) -> None:
        """Send SIGSTOP to all processes in the session, as if the machine were suspended."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Continue the processes that `pause` has stopped."""
        self._signal(signal.SIGCONT)

    def processes(self) -> list[psutil.Process]:
        """Return the living processes in the session, and in those of earlier, killed leaders."""
        return processes.of_sessions(self.sessions)

    @property
    def sessions(self) -> list[int]:
        """Ids of the session (the pid of its leader) and of those of earlier, killed leaders."""
        return [each.pid for each in (self._process, *self._orphaned) if each]

    @property
    def is_running(self) -> bool:
        """Whether the session leader is alive."""
        # Popen.poll() would collect a dead leader, and its pid could then become the id of another session.
        return bool(self._process) and psutil.Process(self.sessions[0]).status() != psutil.STATUS_ZOMBIE

    def wait(self) -> int | None:
        """Wait until the session leader has ended. Returns its exit code, or None if it was not started."""
        code = self._process.wait() if self._process else None
        while self._orphaned:
            self._orphaned.pop().wait()
        self._process = None
        return code

    def tail(self, lines: int = 20) -> str:
        """Return the last lines of the log."""
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
    """An Airflow deployment that runs during the `with` block. It is also a client of its own REST API.

    Its processes inherit only PATH and TMPDIR from the caller's environment.

    :param home: AIRFLOW_HOME, which is created.
    :param dags: folder with the DAGs.
    :param env: further environment variables, such as connections (`AIRFLOW_CONN_…`) and configuration
        (`AIRFLOW__…`).
    :param parallelism: maximum number of tasks that run at the same time.
    :param base_path: serve the web interface and the API under this path, such as ``/airflow``.
    :ivar components: the components that `launch` starts. A subclass may start others.
    :ivar passwords: the users of the simple auth manager that can log in, with their passwords.
    """

    def __init__(
        self,
        name: str,
        home: Path,
        dags: Path,
        *,
        env: Mapping[str, str] | None = None,
        parallelism: int = 4,
        base_path: str = "",
    ) -> None:
        self.name = name
        self.home = home.absolute()
        self.port = free_port()
        self.status = "not started"
        super().__init__(f"http://127.0.0.1:{self.port}{base_path}", "admin", secrets.token_urlsafe(9))
        self.passwords = {self.username: self.password}
        self._environment = self._base_environment(dags.absolute(), parallelism) | dict(env or {})

        self._migration = self.component("db-migrate", "db", "migrate")
        self.api_server = self.component("api-server")
        # No log servers: they would listen on all addresses, and all logs are on this disk anyway.
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
        """First step of the start: create the home, and start to create the database."""
        self.status = "creating its database"
        self.make_home()
        self._migration.start()

    def make_home(self) -> None:
        """Create the home, and start the reaper, which kills the deployment when this process dies."""
        (self.home / "output").mkdir(parents=True)
        self._reaper = subprocess.Popen(
            [sys.executable, processes.__file__, str(self.home)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )
        # Airflow generates a user's password only if this file has none.
        (self.home / "simple_auth_manager_passwords.json.generated").write_text(json.dumps(self.passwords))

    def launch(self) -> None:
        """Second step of the start: wait for the database, and start the components.

        :raises AirflowError: the database could not be created.
        """
        if self._migration.wait() != 0:
            raise AirflowError(f"{self.name}: could not create the database:\n{self._migration.tail()}")
        self.tune_database()
        for component in self.components:
            component.start()

    def tune_database(self) -> None:
        """Configure the database after its migration, before any component uses it."""
        with sqlite3.connect(self.home / "airflow.db") as database:
            database.execute("PRAGMA journal_mode = WAL")  # so that readers do not wait for writers
        database.close()

    def wait_until_healthy(self, timeout: float = HEALTHY) -> None:
        """Wait until each component has sent a heartbeat since its start.

        This is the last step of the start. Call it again after starting a component again.

        :raises AirflowError: a component has died, or is not healthy after `timeout` seconds.
        """
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
        """End all processes of the deployment, in any state of its start."""
        self.status = "stopping"
        processes.end(self.processes, GRACE)
        for component in (self._migration, *self.components):
            component.wait()
        if self._reaper:
            self._reaper.communicate()
        self.close()
        self.status = "stopped"

    def processes(self) -> list[psutil.Process]:
        """Return all living processes of the deployment."""
        sessions = [session for component in self.components for session in component.sessions]
        return processes.of_home(self.home, sessions)

    def ended_processes(self) -> list[tuple[str, float]]:
        """Return the ended processes of tasks, each as task instance id and seconds in a worker slot.

        Airflow logs the end of a process up to five seconds later. Airflow 3.0 logs no id, so it is empty.
        """
        logs = [component.log for component in self.components if component.log.exists()]
        found = [_FINISHED.findall(log.read_text(errors="replace")) for log in logs]
        return [(ti, float(seconds)) for each in found for seconds, ti in each]

    def component(self, name: str, *command: str) -> Component:
        """Create a component that runs an Airflow command: `command`, or if empty the command `name`."""
        return self.server(name, sys.executable, "-m", "airflow", *(command or [name]))

    def server(self, name: str, *command: str, account: pwd.struct_passwd | None = None) -> Component:
        """Create a component that runs any program, with the environment of the deployment."""
        return Component(name, [*command], self._environment, self.home / "output" / f"{name}.log", account)

    def _unhealthy(self) -> list[Component]:
        """Return the components that have sent no heartbeat since their start.

        The API server sends none. While it does not answer, all components are returned.
        """
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
            if component in self.components
            and (heartbeat is None or datetime.fromisoformat(heartbeat) < component.started)
        ]

    def _base_environment(self, dags: Path, parallelism: int) -> dict[str, str]:
        passed_on = {name: os.environ[name] for name in ("TMPDIR",) if name in os.environ}
        return passed_on | {
            # The programs of this Python environment take precedence.
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
            # The SDK must find no credentials: neither in ~/.aws nor at a cloud's metadata service.
            "HOME": str(self.home),
            "AWS_EC2_METADATA_DISABLED": "true",
            "LANG": "C.UTF-8",
            "AIRFLOW_HOME": str(self.home),
            # Airflow sets process titles, which by default overwrite the environment that `processes` reads.
            "SPT_NOENV": "1",
            "AIRFLOW__API__BASE_URL": self.url,
            # Show errors in the answers of the API too, not only in the log.
            "AIRFLOW__API__EXPOSE_STACKTRACE": "True",
            "AIRFLOW__API__HOST": "127.0.0.1",
            "AIRFLOW__API__PORT": str(self.port),
            "AIRFLOW__API__WORKERS": "1",
            "AIRFLOW__CORE__DAGS_ARE_PAUSED_AT_CREATION": "False",
            "AIRFLOW__CORE__DAGS_FOLDER": str(dags),
            "AIRFLOW__CORE__EXECUTION_API_SERVER_URL": f"{self.url}/execution/",
            "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
            "AIRFLOW__CORE__PARALLELISM": str(parallelism),
            # Half as often as by default, for speed. This is also how soon a file is parsed again if a busy machine
            # did not parse it in time. A changed file does not wait for it.
            "AIRFLOW__DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "60",
            "AIRFLOW__DAG_PROCESSOR__PARSING_PROCESSES": "1",
            "AIRFLOW__DAG_PROCESSOR__REFRESH_INTERVAL": "5",
            # With the default, Airflow removes the DAGs if the machine is suspended for a minute.
            "AIRFLOW__DAG_PROCESSOR__STALE_DAG_THRESHOLD": "600",
            "AIRFLOW__LOGGING__COLORED_CONSOLE_LOG": "False",
            # With the default of 5 s, tasks fail on a busy machine, where the API server answers late.
            "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": "60",
            "NO_PROXY": "127.0.0.1",
        }


@contextmanager
def running(*deployments: Deployment) -> Iterator[None]:
    """Run several deployments during the `with` block. They start and stop at the same time."""
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
    """Return a port on 127.0.0.1 that the operating system assigns to no other socket for about a minute.

    A port that is merely free at the moment may get another connection before Airflow listens on it.
    """
    # A closed connection leaves the port in TIME_WAIT, where only a server with SO_REUSEADDR can bind it.
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        server.accept()[0].close()
        return int(server.getsockname()[1])
