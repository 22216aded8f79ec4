"""The magics ``%%dynamo_lock`` and ``%dynamo_locks``, their configuration, and the completion of their options."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from IPython.core.error import TryNext, UsageError
from IPython.core.magic import Magics, line_cell_magic, line_magic, magics_class
from traitlets import Float, Unicode

from airflow_dynamo_lock.cli.locks import this_user
from airflow_dynamo_lock.cli.options import check_keys, settings_from
from airflow_dynamo_lock.core.model.errors import LockError
from airflow_dynamo_lock.notebook.cell import Body, LockedCell
from airflow_dynamo_lock.notebook.display import LocksTable, formatters
from airflow_dynamo_lock.notebook.options import MAGIC, cell_options, list_options, parse, split

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

_CELL = f"%%{MAGIC}"
# The lines whose words are completed here.
_COMPLETED = rf"%{{1,2}}{MAGIC}s?\b"


@magics_class
class DynamoLockMagics(Magics):
    """The magics, and the options that every use of them has. A magic's own options take precedence."""

    table = Unicode(None, allow_none=True, help="Name of the lock table.").tag(config=True)
    conn_id = Unicode(
        None, allow_none=True, help="Airflow connection that has all settings. Needs Airflow."
    ).tag(config=True)
    region = Unicode(None, allow_none=True, help="AWS region of the table.").tag(config=True)
    profile = Unicode(None, allow_none=True, help="Profile of the AWS configuration.").tag(config=True)
    endpoint_url = Unicode(None, allow_none=True, help="URL of a DynamoDB server other than AWS's.").tag(
        config=True
    )
    owner = Unicode(
        None,
        allow_none=True,
        help="Name of the holder, for people to read. Default: user, host and notebook.",
    ).tag(config=True)
    lease = Float(30.0, help="How long a lease lasts after its last heartbeat, in seconds.").tag(config=True)

    shell: Any  # IPython's own declaration allows None

    def __init__(self, shell: InteractiveShell) -> None:
        super().__init__(shell=shell, parent=shell)
        self._keys: dict[str, None] = {}  # that were used or shown, for the completion

    def load(self) -> None:
        """Register the magics, the completion, and the display of leases and records."""
        shell = self.shell
        shell.register_magics(self)
        shell.input_transformers_cleanup.append(self.prepare)
        shell.set_hook("complete_command", self.complete, re_key=_COMPLETED)
        html = shell.display_formatter.formatters["text/html"]
        for kind, shown in formatters().items():
            html.for_type(kind, shown)

    def unload(self) -> None:
        """Undo `load`."""
        shell = self.shell
        for magics in shell.magics_manager.magics.values():
            for name in (MAGIC, f"{MAGIC}s"):
                magics.pop(name, None)
        shell.configurables.remove(self)
        shell.input_transformers_cleanup.remove(self.prepare)
        shell.strdispatchers["complete_command"].regexs.pop(re.compile(_COMPLETED), None)
        html = shell.display_formatter.formatters["text/html"]
        for kind in formatters():
            html.pop(kind, None)

    @line_cell_magic(MAGIC)  # type: ignore[arg-type] # declared without parameters
    def dynamo_lock(self, line: str, cell: str | None = None) -> Any:
        """Hold a lock while the cell runs. `%dynamo_lock --help` shows the options."""
        arguments = self._arguments(line, owner=self.owner or _owner(), lease_duration=self.lease)
        options = self._parse(cell_options, arguments)
        if options is None:
            return None
        if cell is None:
            raise UsageError(
                f"%{MAGIC} has only --help: to lock a cell, write {_CELL} KEY as its first line."
            )
        # IPython leaves `{name}` and `$name` if it cannot fill them in. Another cell would then hold another lock.
        if re.search(r"{.*}|\$\w", options["key"]):
            raise UsageError(
                f"The key {options['key']!r} contains a name in braces or behind a $ that IPython could not fill in: "
                "define the name first, or choose a key without these characters."
            )
        body = Body(self.shell, cell)
        self._keys[options["key"]] = None
        locked = LockedCell(self.shell, body, options["key"], arguments)
        return locked.run_awaiting() if body.awaits else locked.run()

    @line_magic(f"{MAGIC}s")  # type: ignore[arg-type]
    def dynamo_locks(self, line: str) -> LocksTable | None:
        """Show the locks of the table. `%dynamo_locks --help` shows the options."""
        options = self._parse(list_options, self._arguments(line))
        if options is None:
            return None
        try:
            where, others = settings_from(options)
            prefix: str = others["prefix"]
            locks = where.locks()
            records = sorted(locks.list_locks(prefix), key=lambda each: each.key)
            if not records:
                check_keys(locks)
        except click.UsageError as wrong:
            raise UsageError(wrong.format_message()) from None
        except LockError as failure:
            # The hook of IPython for exceptions that render themselves: the frames say nothing about the notebook.
            only = list(self.shell.InteractiveTB.get_exception_only(type(failure), failure))
            failure._render_traceback_ = lambda: only  # type: ignore[attr-defined]
            raise
        self._keys |= dict.fromkeys(each.key for each in records)
        named = f" whose keys begin with {prefix!r}" if prefix else ""
        return LocksTable(records, f"The table {where.table!r} has no locks{named}.")

    def prepare(self, lines: list[str]) -> list[str]:
        """Transform a cell so that IPython awaits it if its body awaits, and reports its syntax errors itself.

        :param lines: the lines of the cell.
        """
        if not lines or not lines[0].startswith(f"{_CELL} "):
            return lines
        first, body = lines[0].removeprefix(_CELL).strip(), "".join(lines[1:])
        try:
            text = self.shell.transform_cell(body)
            compile(text, "<cell>", "exec", dont_inherit=True, flags=_compile_flags(self.shell))
        except (SyntaxError, ValueError, OverflowError, MemoryError):
            return lines[1:]
        if not self.shell.should_run_async(body, transformed_cell=text):
            return lines
        return [f"await get_ipython().run_cell_magic({MAGIC!r}, {first!r}, {body!r})\n"]

    def complete(self, _: Any, event: Any) -> Iterable[str]:
        """Complete options, values of ``--mode``, and the keys that were used or shown. Reads no table."""
        words = event.line[: event.line.rfind(event.symbol)].split() if event.symbol else event.line.split()
        command = list_options if words and words[0].endswith("s") else cell_options
        known = {name: each for each in command.params for name in (*each.opts, *each.secondary_opts)}
        option = known.get(words[-1]) if words else None
        if isinstance(option, click.Option) and not option.is_flag:
            if isinstance(option.type, click.Choice):
                return [str(each) for each in option.type.choices]
            raise TryNext
        if event.symbol.startswith("-"):
            return sorted(name for name in known if name.startswith("--"))
        return [*self._keys]

    def _arguments(self, line: str, **defaults: Any) -> list[str]:
        """The arguments of a magic, behind those from the configuration: the last one of a kind counts."""
        defaults |= {
            name: getattr(self, name) for name in ("table", "conn_id", "region", "profile", "endpoint_url")
        }
        configured = [
            text
            for name, value in defaults.items()
            if value is not None
            for text in (f"--{name.replace('_', '-')}", str(value))
        ]
        try:
            return [*configured, *split(line)]
        except click.UsageError as wrong:
            raise UsageError(wrong.format_message()) from None

    def _parse(self, command: click.Command, arguments: list[str]) -> dict[str, Any] | None:
        """The values of the options; None if the arguments ask for help, which is printed.

        :raises UsageError: they are wrong.
        """
        try:
            return parse(command, arguments)
        except click.exceptions.Exit:
            return None
        except click.ClickException as wrong:
            raise UsageError(wrong.format_message()) from None


def _compile_flags(shell: InteractiveShell) -> int:
    return shell.compile.flags | (ast.PyCF_ALLOW_TOP_LEVEL_AWAIT if shell.autoawait else 0)


def _owner() -> str:
    """The user, the host, and the notebook if Jupyter says which it is."""
    notebook = Path(os.environ.get("JPY_SESSION_NAME", "")).name
    return f"{this_user()} {notebook}" if notebook else f"{this_user()}:{os.getpid()}"
