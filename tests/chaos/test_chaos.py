"""A minute of the chaos run on both engines, and tests of the parts that it uses."""

from __future__ import annotations

import secrets
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil
import pytest

from airflow_dynamo_lock import LockUnavailableError
from deployments.clients import lock_client
from deployments.engines import DynamoDBLocal, MotoServer
from deployments.patience import PATIENCE
from deployments.proxy import Proxy, Rule
from proof.chaos.__main__ import run
from proof.chaos.report import as_text

pytestmark = pytest.mark.proof

ROOT = Path(__file__).parents[2]


def test_a_minute_of_chaos_violates_nothing() -> None:
    seed = secrets.token_hex(4)
    reports = run([MotoServer, DynamoDBLocal], seed, 40.0)  # the last turns take another 20 s
    text = "\n\n".join(as_text(report) for report in reports)
    print(f"seed {seed}\n{text}")
    assert not any(report.violations for report in reports), f"seed {seed}\n{text}"


def test_a_process_that_ignores_the_end_of_its_lease_is_found() -> None:
    (report,) = run([MotoServer], "careless", 9.0, careless=True)
    found = [violation for violation in report.violations if violation.what == "exclusion"]
    assert found
    assert all("careless" in violation.details for violation in report.violations), as_text(report)


@pytest.mark.parametrize("ending", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_survives_a_run(ending: signal.Signals, tmp_path: Path) -> None:
    chaos = subprocess.Popen(
        [sys.executable, "-m", "proof.chaos", "--minutes", "5", "--engine", "moto", "--seed", "7"],
        cwd=ROOT,
        env={"PATH": "/usr/bin:/bin", "TMPDIR": str(tmp_path)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        children = _descendants(chaos, at_least=8)
        actor = next(each for each in children if each.ppid() != chaos.pid)
        actor.suspend()  # so that it cannot end by itself
        chaos.send_signal(ending)
        code = chaos.wait(PATIENCE)
    finally:
        chaos.kill()
        chaos.wait()
    _, alive = psutil.wait_procs(children, timeout=PATIENCE)
    assert alive == []
    if ending != signal.SIGKILL:
        assert code == 130
        assert list(tmp_path.iterdir()) == []


def _descendants(process: subprocess.Popen[bytes], *, at_least: int) -> list[psutil.Process]:
    """Wait until a process has that many descendants, and return them."""
    deadline = time.monotonic() + PATIENCE
    while len(children := psutil.Process(process.pid).children(recursive=True)) < at_least:
        assert time.monotonic() < deadline, f"only {len(children)} processes have started"
        time.sleep(0.1)
    return children


def test_dynamodb_local_keeps_its_data_in_a_folder() -> None:
    with tempfile.TemporaryDirectory() as folder, DynamoDBLocal(folder=Path(folder)) as engine:
        url = engine.endpoint_url
        with lock_client("sync", url) as client:
            client.create_table()
            client.try_acquire("key")
            before = client.get("key")
            engine.restart()
            assert engine.endpoint_url == url
            assert client.get("key") == before


def test_a_truncated_answer_is_an_error() -> None:
    """botocore takes a truncated answer for an empty one, which would mean that the lock is free."""
    with (
        MotoServer() as engine,
        Proxy(engine.endpoint_url) as proxy,
        lock_client("sync", engine.endpoint_url) as client,
        lock_client("sync", proxy.endpoint_url) as other,
    ):
        client.create_table()
        client.try_acquire("key")
        with proxy.applying(Rule(lambda _: True, tears=True)), pytest.raises(LockUnavailableError):
            other.get("key")
