"""The demo, as ``make demo`` runs it: two deployments take turns, and no process and no file is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from deployments.patience import PATIENCE, wait_until

ROOT = Path(__file__).parents[1]


def demo(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    """Start the demo in a folder of its own, which also contains its temporary files."""
    (folder / "tmp").mkdir()
    return subprocess.Popen(
        [sys.executable, "-m", "demo", *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder / "tmp")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def airflow_processes(folder: Path) -> list[str]:
    """Return the command lines of processes that have their AIRFLOW_HOME in the folder."""
    processes = psutil.process_iter(["environ", "cmdline", "status"])
    return [
        " ".join(process.info["cmdline"] or [])
        for process in processes
        if str(folder) in (process.info["environ"] or {}).get("AIRFLOW_HOME", "")
        and process.info["status"] != psutil.STATUS_ZOMBIE
    ]


def assert_nothing_left(folder: Path) -> None:
    assert airflow_processes(folder) == []
    assert list((folder / "tmp").iterdir()) == []


def test_two_deployments_take_turns(tmp_path: Path) -> None:
    output, _ = demo(tmp_path, "--runs", "1").communicate(timeout=900)
    assert "2 of 2 runs have ended" in output, output
    assert "No two runs overlapped, and every run had its turn." in output, output
    assert "<svg" in (tmp_path / "demo-report" / "index.html").read_text()
    assert_nothing_left(tmp_path)


@pytest.mark.proof
def test_ctrl_c_leaves_nothing_behind(tmp_path: Path) -> None:
    running = demo(tmp_path)
    wait_until(lambda: len(airflow_processes(tmp_path)) >= 4, "four processes of Airflow run")
    running.send_signal(signal.SIGINT)
    output, _ = running.communicate(timeout=PATIENCE)
    assert running.returncode == 128 + signal.SIGINT
    assert "Traceback" not in output
    assert_nothing_left(tmp_path)
