"""Real Jupyter kernels, and what a notebook would show of their cells."""

from __future__ import annotations

import os
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty
from types import TracebackType
from typing import Any, Self

from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager

from deployments.patience import PATIENCE

_ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class Cell:
    """A cell that a kernel executes.

    :ivar request: id of the request.
    :ivar outputs: the outputs as a notebook saves them: each display once, as it was last.
    :ivar shown: the texts of all displays, in the order in which they appeared and changed.
    :ivar reply: the kernel's reply, when the cell has ended.
    """

    request: str
    outputs: list[dict[str, Any]] = field(default_factory=list)
    shown: list[str] = field(default_factory=list)
    reply: dict[str, Any] = field(default_factory=dict)

    @property
    def error(self) -> str | None:
        """The name of the error with which the cell ended; None if it succeeded."""
        return self.reply.get("ename")

    @property
    def streamed(self) -> str:
        """What the cell has written to stdout and stderr."""
        return "".join(each["text"] for each in self.outputs if each["type"] == "stream")

    def without_status(self) -> list[dict[str, Any]]:
        """The outputs but for the line about the lock."""
        return [each for each in self.outputs if "🔒" not in str(each.get("html"))]

    def add(self, kind: str, content: dict[str, Any]) -> None:
        """Handle one message."""
        match kind:
            case "stream":
                if self.outputs and self.outputs[-1]["type"] == kind:
                    self.outputs[-1]["text"] += content["text"]
                else:
                    self.outputs.append({"type": kind, "text": content["text"]})
            case "display_data" | "update_display_data" | "execute_result":
                data, display = content["data"], content.get("transient", {}).get("display_id")
                shown = {
                    "type": kind,
                    "text": data["text/plain"],
                    "html": data.get("text/html"),
                    "id": display,
                }
                self.shown.append(data["text/plain"])
                if kind == "update_display_data":
                    for each in self.outputs:
                        if each.get("id") == display:
                            each |= {**shown, "type": "display_data"}
                else:
                    self.outputs.append(shown)
            case "error":
                traceback = [_ANSI.sub("", line) for line in content["traceback"]]
                self.outputs.append({"type": kind, "name": content["ename"], "traceback": traceback})


class Kernel:
    """A kernel in a process of its own, for the length of a ``with`` block.

    :param environment: environment variables, added to those of the tests.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self._folder = tempfile.TemporaryDirectory()
        # No TCP: two kernels that start at the same time may choose the same port.
        connection = str(Path(self._folder.name) / "kernel.json")
        self.manager = KernelManager(transport="ipc", connection_file=connection)
        # Another environment, to test other versions of Python and IPython.
        self.manager.kernel_spec.argv[0] = os.environ.get("DYNAMO_LOCK_TEST_KERNEL", sys.executable)  # type: ignore[union-attr]
        self._environment = environment

    def __enter__(self) -> Self:
        self.manager.start_kernel(env={**os.environ, **self._environment})
        self.client: BlockingKernelClient = self.manager.client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=PATIENCE)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.client.stop_channels()
        if self.manager.has_kernel:
            self.manager.shutdown_kernel(now=True)
        self._folder.cleanup()

    def subshell(self) -> str:
        """Create a subshell, which executes cells while the main one is busy. Returns its id."""
        self.client.control_channel.send(self.client.session.msg("create_subshell_request"))
        reply = self.client.get_control_msg(timeout=PATIENCE)
        created: str = reply["content"]["subshell_id"]
        return created

    def start(self, code: str, subshell: str | None = None) -> Cell:
        """Let the kernel execute a cell, and do not wait for it.

        :param subshell: id of the subshell that executes it; None for the main one.
        """
        if subshell is None:
            return Cell(self.client.execute(code, allow_stdin=False))
        content = {"code": code, "silent": False, "store_history": True, "allow_stdin": False}
        request = self.client.session.msg("execute_request", content)
        request["header"]["subshell_id"] = subshell
        self.client.shell_channel.send(request)
        return Cell(request["header"]["msg_id"])

    def read(self, cell: Cell, until: str | None = None) -> Cell:
        """Read messages until the cell has ended, or until a text is shown or streamed.

        :param until: the text; None waits for the end.
        """
        deadline = time.monotonic() + PATIENCE
        while until is None or until not in f"{cell.shown} {cell.streamed}":
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except Empty:
                assert time.monotonic() < deadline, (until, cell)
                continue
            if message["parent_header"].get("msg_id") != cell.request:
                continue
            cell.add(message["msg_type"], message["content"])
            if message["content"].get("execution_state") == "idle":
                assert until is None, (until, cell)
                break
        else:
            return cell
        while cell.reply.get("request") != cell.request:
            reply = self.client.get_shell_msg(timeout=PATIENCE)
            cell.reply = {**reply["content"], "request": reply["parent_header"]["msg_id"]}
        return cell

    def run(self, code: str) -> Cell:
        """Execute a cell to its end."""
        return self.read(self.start(code))

    def interrupt(self) -> None:
        """Interrupt the kernel, as Jupyter's button does."""
        self.manager.interrupt_kernel()

    @property
    def pid(self) -> int:
        """The id of its process."""
        found: int = self.manager.provisioner.pid  # type: ignore[union-attr]
        return found


#: The ways in which a kernel ends while a cell of it works.
ENDS: dict[str, Callable[[Kernel], object]] = {
    "shutdown": lambda kernel: kernel.manager.shutdown_kernel(now=False),
    "shutdown at once": lambda kernel: kernel.manager.shutdown_kernel(now=True),
    "restart": lambda kernel: kernel.manager.restart_kernel(now=False),
    "SIGTERM": lambda kernel: os.kill(kernel.pid, signal.SIGTERM),
    "SIGKILL": lambda kernel: os.kill(kernel.pid, signal.SIGKILL),
}
#: Cells that work until they are ended.
BODIES = {
    "a sleep": "import time\ntime.sleep(1000)",
    "an await": "import asyncio\nawait asyncio.sleep(1000)",
    "a body that catches everything": (
        "import time\nwhile True:\n    try:\n        time.sleep(1000)\n    except BaseException:\n        pass"
    ),
}
