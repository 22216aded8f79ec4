"""Runs the body of a locked cell as IPython runs a plain one: same output, same result, same traceback.

The body is compiled before the lock is waited for. IPython's `run_cell` cannot run it: an error in a cell inside of a
cell is shown, but does not fail the outer one, so papermill would go on.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager
from contextvars import ContextVar
from queue import SimpleQueue
from types import CodeType, NoneType
from typing import TYPE_CHECKING, Any

from airflow_dynamo_lock.core.model.lease import Lease
from airflow_dynamo_lock.core.model.text import utc
from airflow_dynamo_lock.notebook.display import Status
from airflow_dynamo_lock.notebook.holder import RELEASE_FOR
from airflow_dynamo_lock.notebook.interrupts import Interrupts
from airflow_dynamo_lock.notebook.kernel import HolderProcess

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

# Maximum time in seconds to wait for the confirmation of a release. The holder process retries for longer.
_RELEASED_WITHIN = 5.0

# The value of DYNAMO_LOCK_HELD from the locked cell around the running code.
_held_around: ContextVar[str | None] = ContextVar("_held_around", default=None)


class Body:
    """The compiled code of a cell.

    :param shell: IPython.
    :param source: the cell without its first line.
    :raises SyntaxError: it cannot be compiled.
    """

    def __init__(self, shell: InteractiveShell, source: str) -> None:
        self._shell = shell
        text = shell.transform_cell(source)
        compiler: Any = shell.compile
        # The number of the cell, also in an IPython that counts it as soon as it starts.
        number = getattr(shell.displayhook.exec_result, "execution_count", None) or shell.execution_count
        name = compiler.cache(text, number, raw_code=source)
        tree = shell.transform_ast(compiler.ast_parse(text, filename=name))
        flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if shell.autoawait else 0
        with compiler.extra_flags(flags):
            self._parts: list[CodeType] = [
                compiler(node, name, mode) for node, mode in _parts(shell, tree.body, text)
            ]

    @property
    def awaits(self) -> bool:
        """Whether it has an ``await`` outside of functions."""
        return any(part.co_flags & inspect.CO_COROUTINE for part in self._parts)

    def show_only_own_frames(self, failure: BaseException) -> None:
        """Let IPython show a traceback that begins with this body, as that of a plain cell does.

        Without frames of the body, such as if the lock was not acquired, only the error itself is shown.
        """

        def render() -> list[str]:
            frames = failure.__traceback__
            while frames is not None and frames.tb_frame.f_code not in self._parts:
                frames = frames.tb_next
            tracebacks: Any = self._shell.InteractiveTB
            if frames is None:
                return list(tracebacks.get_exception_only(type(failure), failure))
            return list(tracebacks.structured_traceback(type(failure), failure, frames, tb_offset=0))

        # The hook of IPython for exceptions that render themselves.
        failure._render_traceback_ = render  # type: ignore[attr-defined]

    def run(self) -> None:
        """Run a body that does not await."""
        for part in self._parts:
            exec(part, self._shell.user_global_ns, self._shell.user_ns)  # noqa: S102 - the user's own cell

    async def run_awaiting(self) -> None:
        """Run a body that awaits."""
        for part in self._parts:
            running = eval(part, self._shell.user_global_ns, self._shell.user_ns)  # noqa: S307
            if part.co_flags & inspect.CO_COROUTINE:
                await running


def _parts(
    shell: InteractiveShell, nodes: list[ast.stmt], text: str
) -> Iterator[tuple[ast.Module | ast.Interactive, str]]:
    """The statements as IPython compiles them: ``single`` shows the value of an expression, ``exec`` does not."""
    interactivity = shell.ast_node_interactivity
    if interactivity == "last_expr_or_assign":
        nodes = _with_assigned(nodes)
        interactivity = "last_expr"
    if interactivity == "last_expr":
        interactivity = "last" if nodes and isinstance(nodes[-1], ast.Expr) else "none"
    for number, node in enumerate(nodes, 1):
        shows = interactivity == "all" or (interactivity == "last" and number == len(nodes))
        # IPython looks for the final semicolon in the whole cell, which ends with the call of the magic.
        if shows and not shell.displayhook.semicolon_at_end_of_expression(text):
            yield ast.Interactive([node]), "single"
        else:
            yield ast.Module([node], []), "exec"


def _with_assigned(nodes: list[ast.stmt]) -> list[ast.stmt]:
    """The statements, and one more that shows what the last one assigns."""
    last = nodes[-1] if nodes else None
    if isinstance(last, ast.Assign) and len(last.targets) == 1 and isinstance(last.targets[0], ast.Name):
        name = last.targets[0].id
    elif isinstance(last, (ast.AugAssign, ast.AnnAssign)) and isinstance(last.target, ast.Name):
        name = last.target.id
    else:
        return nodes
    shown = ast.Expr(ast.Name(name, ast.Load()))
    return [*nodes, ast.fix_missing_locations(ast.copy_location(shown, last))]


class LockedCell:
    """One run of a cell under its lock.

    :param shell: IPython.
    :param body: the cell without its first line.
    :param key: name of the lock.
    :param arguments: all arguments of the magic.
    """

    def __init__(self, shell: InteractiveShell, body: Body, key: str, arguments: list[str]) -> None:
        self._shell = shell
        self._body = body
        self._status = Status(key)
        self._arguments = arguments

    def run(self) -> None:
        """Acquire the lock, run the body, and release the lock.

        :raises LockError: the lock was not acquired, or the lease was lost.
        """
        failure: BaseException | None = None
        with Interrupts() as interrupts:
            holder, decided = self._holder(interrupts), SimpleQueue[Future[Lease]]()
            # Not by `Future.result`, whose lock an interrupt could leave locked.
            holder.granted.add_done_callback(decided.put)
            try:
                lease = interrupts.call(
                    lambda: decided.get()
                ).result()  # an interrupt needs a frame of Python's
                with self._working(holder, lease):
                    interrupts.call(self._body.run)
            except BaseException as raised:
                failure = raised
            holder.end_cell()
            wait([holder.ended], timeout=_RELEASED_WITHIN)
            failure = self._end(holder, failure)
            interrupts.wait_until_quiet()
        self._raise(failure, interrupts)

    async def run_awaiting(self) -> None:
        """`run` for a body that awaits.

        :raises LockError: the lock was not acquired, or the lease was lost.
        """
        failure: BaseException | None = None
        with Interrupts(asyncio.current_task()) as interrupts:
            holder = self._holder(interrupts)
            try:
                lease = await interrupts.run(asyncio.wrap_future(holder.granted))
                with self._working(holder, lease):
                    await interrupts.run(self._body.run_awaiting())
            except BaseException as raised:
                failure = raised
            holder.end_cell()
            if not isinstance(failure, GeneratorExit):  # a coroutine that is closed cannot await
                await _until_done(holder.ended, interrupts)
            failure = self._end(holder, failure)
            interrupts.wait_until_quiet()
        self._raise(failure, interrupts)

    def _holder(self, interrupts: Interrupts) -> HolderProcess:
        """Start the process that acquires the lock."""
        return HolderProcess(self._arguments, _held_around.get(), self._status.show, interrupts.stop)

    @contextmanager
    def _working(self, holder: HolderProcess, lease: Lease) -> Iterator[None]:
        """The block in which the body runs."""
        self._status.show(f"Held since {utc(lease.acquired_at_ms):%H:%M:%S} UTC, token {lease.token}.")
        self._shell.user_ns["lease"] = lease
        outer = _held_around.get()
        _held_around.set(holder.held)
        try:
            yield
        finally:
            _held_around.set(outer)

    def _end(self, holder: HolderProcess, failure: BaseException | None) -> BaseException | None:
        """Show what became of the lock. Returns the error with which the cell ends."""
        if not holder.was_granted():
            self._status.show("Not acquired.")
            # Without the frames that wait: they say nothing about the cell.
            return None if failure is None else failure.with_traceback(None)
        if (lost := holder.lost()) is not None:
            self._status.show("Lost.")
            if not isinstance(failure, (KeyboardInterrupt, asyncio.CancelledError, NoneType)):
                return failure
            lost.__suppress_context__ = True
            return lost.with_traceback(None if failure is None else failure.__traceback__)
        if not holder.ended.done():
            self._status.show(
                "Not released yet, because DynamoDB does not answer. "
                f"The release is retried for up to {RELEASE_FOR:g} s."
            )
        elif (problem := holder.ended.exception()) is not None:
            self._status.show(f"Not released, the lease will run out: {problem}")
        else:
            self._status.show(f"Released after {holder.held_for():.0f} s.")
        return failure

    def _raise(self, failure: BaseException | None, interrupts: Interrupts) -> None:
        if failure is not None:
            self._body.show_only_own_frames(failure)
            raise failure
        interrupts.raise_kept()


async def _until_done(future: Future[Any], interrupts: Interrupts) -> None:
    """Wait for the end of the holder process, and keep a cancellation for later."""
    waiting = asyncio.wrap_future(future)
    loop, task = asyncio.get_running_loop(), asyncio.current_task()
    deadline = loop.time() + _RELEASED_WITHIN
    while not waiting.done() and (left := deadline - loop.time()) > 0:
        try:
            await asyncio.wait([waiting], timeout=left)
        except asyncio.CancelledError:
            interrupts.keep()
            if task is not None:
                task.uncancel()
    waiting.cancel()
