"""A locked cell in a real JupyterLab is run, interrupted and saved in a browser."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from playwright.sync_api import Browser, Locator, Page, expect

from airflow_dynamo_lock import LockClient
from deployments.engines import REGION, MotoServer
from deployments.patience import PATIENCE, wait_until
from tests.browser.conftest import ROOT

pytestmark = pytest.mark.proof

#: Milliseconds within which a window shows what happened, on a slow machine.
expect.set_options(timeout=120_000)

#: Made by the Makefile, from requirements/jupyterlab.txt.
JUPYTER = ROOT / ".cache" / "jupyterlab" / "bin" / "jupyter"
#: `make pictures` copies them to docs/notebooks.
PICTURES = ROOT / ".cache" / "notebooks"
KEY = "warehouse/orders"
HOLDER = "north/orders/scheduled__2026-11-26T02:00:00+00:00/lock.acquire"
#: The notebook. The second cell runs until a file exists.
CELLS = (
    "%load_ext airflow_dynamo_lock",
    f"%%dynamo_lock {KEY} --wait 10m\n"
    "import pathlib, time\n"
    'print("Deleting duplicates …")\n'
    "while not pathlib.Path('done').exists():\n"
    "    time.sleep(0.1)\n"
    'print("3 of 41,209 rows deleted.")\n'
    "lease.token",
    "%dynamo_locks",
)


@dataclass
class Lab:
    """A JupyterLab, and the locks that its kernels use.

    :ivar folder: the folder that it shows.
    """

    url: str
    token: str
    folder: Path
    locks: LockClient

    def open(self, page: Page, name: str, cells: tuple[str, ...]) -> None:
        """Open a new notebook with these cells, and wait until JupyterLab has chosen its kernel."""
        content = {
            "cells": [
                {
                    "cell_type": "code",
                    "id": f"cell-{number}",
                    "metadata": {},
                    "execution_count": None,
                    "outputs": [],
                    "source": each,
                }
                for number, each in enumerate(cells)
            ],
            "metadata": {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}},
            "nbformat": 4,
            "nbformat_minor": 5,
        }
        (self.folder / name).write_text(json.dumps(content))
        page.goto(f"{self.url}lab/workspaces/{Path(name).stem}/tree/{name}?token={self.token}")
        expect(page.locator(".jp-Notebook .jp-CodeCell")).to_have_count(len(cells))
        # A run before that starts a second kernel, beside the one that the notebook is starting. When either
        # fails to start, JupyterLab shows a dialog.
        expect(page.locator(".jp-NotebookPanel .jp-Toolbar-kernelName")).to_have_text("Python 3")


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """A JupyterLab on 127.0.0.1, with a lock table."""
    assert JUPYTER.exists(), f"There is no {JUPYTER}: `make .cache/jupyterlab/.done` installs it."
    home, folder = tmp_path_factory.mktemp("jupyter"), tmp_path_factory.mktemp("notebooks")
    kernel = home / "kernels" / "python3"
    kernel.mkdir(parents=True)
    argv = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"]
    (kernel / "kernel.json").write_text(
        json.dumps({"argv": argv, "display_name": "Python 3", "language": "python"})
    )
    with MotoServer() as engine:
        locks = LockClient(engine.client(), table="airflow_locks")
        locks.create_table()
        environment = {
            **os.environ,
            "HOME": str(home),
            "JUPYTER_PATH": str(home),
            "JUPYTER_RUNTIME_DIR": str(home / "runtime"),
            "JUPYTER_CONFIG_DIR": str(home / "config"),
            "AWS_ENDPOINT_URL_DYNAMODB": engine.endpoint_url,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test-secret",
        }
        # Only our kernel, no requests for news or updates, and no question about them.
        (home / "config" / "labconfig").mkdir(parents=True)
        disabled = {"disabledExtensions": {"@jupyterlab/apputils-extension:announcements": True}}
        (home / "config" / "labconfig" / "page_config.json").write_text(json.dumps(disabled))
        options = [
            "--no-browser",
            "--allow-root",
            "--ServerApp.ip=127.0.0.1",
            "--ServerApp.port=0",
            f"--ServerApp.root_dir={folder}",
            "--KernelSpecManager.ensure_native_kernel=False",
        ]
        with (home / "log").open("w") as log:
            server = subprocess.Popen(
                [JUPYTER, "lab", *options], env=environment, stdout=log, stderr=log, start_new_session=True
            )
        try:
            runtime = home / "runtime"
            wait_until(
                lambda: [*runtime.glob("jpserver-*.json")], f"JupyterLab does not start: {home / 'log'}"
            )
            (written,) = runtime.glob("jpserver-*.json")
            wait_until(lambda: written.read_text().endswith("}"))
            found = json.loads(written.read_text())
            yield Lab(found["url"], found["token"], folder, locks)
        finally:
            # Not by SIGTERM: a server that is restarting a kernel may ignore it.
            started = [psutil.Process(server.pid), *psutil.Process(server.pid).children(recursive=True)]
            for each in started:
                with suppress(psutil.NoSuchProcess):
                    each.kill()
            server.wait()
            psutil.wait_procs(started)


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport={"width": 1100, "height": 500})
    yield context.new_page()
    context.close()


def run(page: Page, number: int) -> Locator:
    """Run a cell, and return its outputs."""
    cell = page.locator(".jp-Notebook .jp-CodeCell").nth(number)
    prompt = cell.locator(".jp-InputArea-prompt").first
    # JupyterLab ignores the key until it is connected with the kernel.
    while prompt.inner_text().strip() == "[ ]:":
        questions = page.get_by_role("dialog").all_inner_texts()
        assert not questions, f"JupyterLab asks: {questions}"
        prompt.click()
        page.keyboard.press("Control+Enter")
        page.wait_for_timeout(500)
    return cell.locator(".jp-OutputArea-output")


def picture(page: Page, name: str) -> None:
    """Take a picture of the notebook."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    page.locator(".jp-NotebookPanel").screenshot(path=PICTURES / f"{name}.png")


def test_a_cell_waits_works_and_releases(lab: Lab, page: Page) -> None:
    """`make pictures` copies its pictures to the docs. They are not compared."""
    lab.open(page, "repair.ipynb", CELLS)
    lease = lab.locks.acquire(KEY, owner=HOLDER)
    run(page, 0)
    outputs = run(page, 1)
    expect(outputs).to_have_count(1)
    expect(outputs).to_contain_text(re.compile(f"{KEY} Locked by {re.escape(HOLDER)} since .* 1st of 1"))
    picture(page, "waiting")

    lab.locks.release(lease)
    expect(outputs).to_have_count(2)
    expect(outputs.first).to_contain_text("Held since")
    expect(outputs.last).to_contain_text("Deleting duplicates")
    picture(page, "working")

    (lab.folder / "done").touch()
    expect(outputs).to_have_count(3)
    expect(outputs.first).to_contain_text(re.compile(r"Released after \d+ s"))
    record = lab.locks.get(KEY)
    assert record is not None
    assert not record.holders
    expect(outputs.last).to_have_text(str(record.token))
    picture(page, "finished")
    expect(run(page, 2).first).to_contain_text(KEY)

    page.keyboard.press("Control+s")
    saved = lab.folder / "repair.ipynb"
    wait_until(lambda: "Released" in saved.read_text())
    kinds = [each["output_type"] for each in json.loads(saved.read_text())["cells"][1]["outputs"]]
    assert kinds == ["display_data", "stream", "execute_result"]


def test_the_stop_button_ends_the_wait(lab: Lab, page: Page) -> None:
    lab.open(page, "wait.ipynb", (CELLS[0], f"%%dynamo_lock {KEY}\n1"))
    lease = lab.locks.acquire(KEY, owner=HOLDER)
    run(page, 0)
    outputs = run(page, 1)
    expect(outputs).to_contain_text("1st of 1")
    page.get_by_role("button", name="Interrupt the kernel").click()
    expect(outputs.last).to_contain_text("KeyboardInterrupt")
    expect(outputs.first).to_contain_text("Not acquired.")
    assert lab.locks.waiters(KEY) == []
    lab.locks.release(lease)


def test_a_restart_of_the_kernel_releases_the_lock(lab: Lab, page: Page) -> None:
    lab.open(page, "restarted.ipynb", (CELLS[0], f"%%dynamo_lock {KEY}\nimport time\ntime.sleep(1000)"))
    run(page, 0)
    expect(run(page, 1)).to_contain_text("Held since")
    page.get_by_role("button", name="Restart the kernel", exact=True).click()
    page.get_by_role("dialog").get_by_role("button", name="Confirm Kernel Restart").click()
    lab.locks.release(lab.locks.acquire(KEY, timeout=PATIENCE))
