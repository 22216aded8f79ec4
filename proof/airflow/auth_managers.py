"""Deployments with each of Airflow's auth managers, and with a user for each role. They run no tasks.

The FAB provider is large, so only the environment `production` of the matrix has it.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from airflow_dynamo_lock import LockClient
from deployments.airflow_client import AirflowClient, AirflowError
from deployments.deployment import Deployment
from deployments.engines import MotoServer
from proof.airflow.testbed import TABLE, table_environment

#: Roles of both auth managers, in the order of their permissions.
ROLES = ("viewer", "user", "op", "admin")
#: DAGs in page_dags/idle.py.
DAGS = ("payroll", "warehouse")
#: Permissions of a FAB role: pairs of an action and a resource.
Permissions = Collection[tuple[str, str]]


class SimpleAuthDeployment(Deployment):
    """An API server with the simple auth manager, and a DAG processor.

    There is a user for each role, with the name of the role.
    """

    def __init__(self, name: str, home: Path, *, env: Mapping[str, str]) -> None:
        users = ",".join(f"{role}:{role}" for role in ROLES)
        super().__init__(
            name,
            home,
            Path(__file__).parent / "page_dags",
            env={"AIRFLOW__CORE__SIMPLE_AUTH_MANAGER_USERS": users, **env},
        )
        self.components = (self.api_server, self.dag_processor)
        self.passwords = {role: secrets.token_urlsafe(9) for role in ROLES} | self.passwords

    def log_in(self, name: str) -> str:
        """Log this user in, and return the access token."""
        client = AirflowClient(self.url, name, self.passwords[name])
        try:
            return client.token
        finally:
            client.close()

    def add_users(self) -> None:
        """Do nothing: the users of the simple auth manager are in its configuration."""


class FabDeployment(SimpleAuthDeployment):
    """An API server with the FAB auth manager, and a DAG processor. It has the same users, and can create others."""

    def __init__(self, name: str, home: Path, *, env: Mapping[str, str]) -> None:
        manager = "airflow.providers.fab.auth_manager.fab_auth_manager.FabAuthManager"
        super().__init__(name, home, env={"AIRFLOW__CORE__AUTH_MANAGER": manager, **env})
        self._admin = self.component(
            "create-admin",
            *("users", "create", "--role", "Admin", "--email", "admin@localhost"),
            *("--firstname", "An", "--lastname", "Admin"),
            *("--username", self.username, f"--password={self.password}"),  # it may begin with a hyphen
        )

    def tune_database(self) -> None:
        """Also create the first user, who can create the others.

        :raises AirflowError: the user could not be created.
        """
        super().tune_database()
        self._admin.start()
        if self._admin.wait() != 0:
            raise AirflowError(f"{self.name}: could not create the administrator:\n{self._admin.tail()}")

    def add_users(self) -> None:
        """Create the users of the roles that the provider defines."""
        for role in ROLES:
            if role != self.username:
                self.add_user(role, role.capitalize())

    def add_user(self, name: str, role: str) -> None:
        """Create a user with a role."""
        self.passwords[name] = secrets.token_urlsafe(9)
        self._create(
            "users",
            username=name,
            email=f"{name}@localhost",
            first_name="A",
            last_name="User",
            roles=[{"name": role}],
            password=self.passwords[name],
        )

    def add_role(self, name: str, permissions: Permissions) -> None:
        """Create a role with some permissions."""
        actions = [
            {"action": {"name": action}, "resource": {"name": resource}} for action, resource in permissions
        ]
        self._create("roles", name=name, actions=actions)

    def _create(self, kind: str, **values: Any) -> None:
        self._request("POST", f"/{kind}", api="/auth/fab/v1", json=values)


#: Auth managers: name → kind of deployment.
AUTH_MANAGERS = {"simple": SimpleAuthDeployment, "fab": FabDeployment}


@contextmanager
def start_auth_manager(name: str, folder: Path) -> Iterator[tuple[SimpleAuthDeployment, LockClient]]:
    """Start a deployment with an auth manager, its users and a lock table, and stop it at the end of the block.

    :param name: a name in `AUTH_MANAGERS`.
    """
    with MotoServer() as engine:
        locks = LockClient(engine.client(), table=TABLE, owner="the tests")
        locks.create_table()
        with AUTH_MANAGERS[name]("north", folder / name, env=table_environment("north", engine)) as airflow:
            airflow.wait_for_dags(DAGS)
            airflow.add_users()
            yield airflow, locks
