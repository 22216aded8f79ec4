"""A locked cell has the result of the same cell without its first line, and runs under the lock."""

from __future__ import annotations

import ast
import re

import pytest

from airflow_dynamo_lock import LockClient
from deployments.kernels import Cell, Kernel
from tests.notebook.conftest import is_free, wait_until_free

pytestmark = pytest.mark.proof

BODIES = {
    "a comment": "# nothing",
    "a statement": "x = 1",
    "a value": "1 + 1",
    "a value that is not shown": "1 + 1;",
    "a value behind statements": "x = [1, 2]\nx.append(3)\nx",
    "output": "import sys\nprint('out')\nprint('err', file=sys.stderr)",
    "a display": "from IPython.display import HTML\nHTML('<b>bold</b>')",
    "an error": "x = 1\n\nx / 0",
    "an error in a function": "def half(x):\n    return x / 0\n\nhalf(2)",
    "an error with a cause": "try:\n    {}['a']\nexcept KeyError as missing:\n    raise ValueError('b') from missing",
    "a failed assertion": "assert 1 == 2, 'not equal'",
    "a syntax error": "x = 1\nif x\n    pass",
    "an indentation error": "def f():\nreturn 1",
    "an exit": "raise SystemExit(3)",
    "a magic": "%pwd\nfiles = !echo hello\nprint(files)",
    "another cell magic": "%%capture captured\nprint('hidden')",
    "an interrupt": "raise KeyboardInterrupt",
    "an awaited value": "import asyncio\nawait asyncio.sleep(0, 'slept')",
    "an await without a value": "import asyncio\nx = await asyncio.sleep(0, 'slept')",
    "an async for": "async def numbers():\n    yield 1\n\nasync for each in numbers():\n    print(each)",
    "an error in an awaited call": "async def fail():\n    raise ValueError('late')\n\nawait fail()",
    "a cancelled cell": "import asyncio\nasyncio.current_task().cancel()\nawait asyncio.sleep(1)",
    "an await in a function": "async def later():\n    await x\n\nlater.__name__",
}


def essentials(cell: Cell) -> tuple[object, ...]:
    """Return what must be equal: the outputs without the status line, and the reply without its numbers."""
    reply = {name: cell.reply.get(name) for name in ("status", "ename", "evalue")}
    outputs = [{**each, "id": None} for each in cell.without_status()]
    return _without_numbers(reply), _without_numbers(outputs)


def _without_numbers(outputs: object) -> str:
    """Remove what differs between two runs of one cell: its number, and the name of its temporary file."""
    return re.sub(r"In\[\d+\]|\(\d+\.py, line|/\d+\.py|0x\w+", "…", repr(outputs))


@pytest.mark.parametrize("body", BODIES)
def test_a_locked_cell_has_the_result_of_the_plain_cell(
    kernel: Kernel, locks: LockClient, key: str, body: str
) -> None:
    kernel.run("import warnings; warnings.simplefilter('ignore')")  # IPython warns once about an exit
    plain = kernel.run(BODIES[body])
    locked = kernel.run(f"%%dynamo_lock '{key}'\n{BODIES[body]}")

    assert essentials(locked) == essentials(plain)
    assert is_free(locks, key)


def test_a_syntax_error_of_code_that_the_cell_compiles_is_the_cells_error(
    kernel: Kernel, locks: LockClient, key: str
) -> None:
    cell = kernel.run(f"%%dynamo_lock '{key}'\nexec('if')")
    assert cell.error == "SyntaxError"
    assert is_free(locks, key)


def test_the_cell_has_the_lease_and_one_line_about_the_lock(kernel: Kernel, key: str) -> None:
    cell = kernel.run(f"%%dynamo_lock '{key}'\nlease.check()\n(lease.key, lease.token > 0, lease.owner)")

    status, result = cell.outputs
    assert status["text"].startswith(f"{key}: Released after ")
    about = [text.removeprefix(f"{key}: ").split()[0] for text in cell.shown if text.startswith(key)]
    assert about == ["Held", "Released"]
    found_key, has_token, owner = ast.literal_eval(result["text"])
    assert (found_key, has_token) == (key, True)
    assert "@" in owner


def test_a_waiting_cell_shows_the_holder_and_its_position_in_one_line(
    kernel: Kernel, locks: LockClient, key: str
) -> None:
    lease = locks.acquire(key)
    cell = kernel.start(f"%%dynamo_lock '{key}' --wait 10m\n'done'")
    kernel.read(cell, until="1st of 1")
    assert "Locked by somebody else" in cell.shown[0]
    locks.release(lease)
    kernel.read(cell)

    assert cell.error is None
    assert [each["type"] for each in cell.outputs] == ["display_data", "execute_result"]
    assert cell.outputs[0]["text"].startswith(f"{key}: Released")


def test_a_cell_that_does_not_get_the_lock_in_time_names_its_holder(
    kernel: Kernel, locks: LockClient, key: str
) -> None:
    locks.acquire(key)
    for wait in ("--wait 1s", "--no-wait"):
        cell = kernel.run(f"%%dynamo_lock '{key}' {wait}\nprint('ran')")
        assert cell.error == "LockTimeoutError"
        assert "somebody else" in cell.reply["evalue"]
        assert cell.streamed == ""
        assert len(cell.outputs[-1]["traceback"]) == 1
        assert cell.outputs[0]["text"] == f"{key}: Not acquired."
    assert locks.waiters(key) == []


def test_readers_share_a_lock(kernel: Kernel, locks: LockClient, key: str) -> None:
    locks.acquire(key, mode="shared")
    assert kernel.run(f"%%dynamo_lock '{key}' --mode shared --no-wait\n1").error is None


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("", "Missing argument 'KEY'"),
        ("a b", "unexpected extra argument (b)"),
        ("--no-such a", "No such option"),
        ("--wait soon a", "is not a duration"),
        ("'a", "cannot be split into options"),
        ("wh/{no_such_name}", "'wh/{no_such_name}' contains a name in braces"),
        ("'{[][0]}'", "contains a name in braces"),
        ("wh/$no_such_name", "'wh/$no_such_name' contains a name in braces or behind a $"),
    ],
)
def test_a_wrong_line_is_reported_in_one_sentence(kernel: Kernel, line: str, complaint: str) -> None:
    cell = kernel.run(f"%%dynamo_lock {line}\nprint('ran')")
    assert cell.error == "UsageError"
    assert complaint in cell.streamed
    assert "ran" not in cell.streamed


def test_a_value_that_can_never_work_is_a_typed_error(kernel: Kernel, key: str) -> None:
    cell = kernel.run(f"%%dynamo_lock '{key}' --slots 3\nprint('ran')")
    assert cell.error == "LockValueError"
    assert cell.streamed == ""


def test_names_in_braces_are_filled_in(kernel: Kernel, key: str) -> None:
    kernel.run(f"name = '{key}'")
    for body in ("lease.key", "await asyncio.sleep(0, lease.key)"):
        kernel.run("import asyncio")
        assert kernel.run(f"%%dynamo_lock 'wh/{{name}}'\n{body}").outputs[-1]["text"] == repr(f"wh/{key}")


def test_a_locked_cell_in_a_locked_cell(kernel: Kernel, locks: LockClient, key: str) -> None:
    cell = kernel.run(f"%%dynamo_lock '{key}'\n%%dynamo_lock '{key}-2'\nlease.key")
    assert cell.outputs[-1]["text"] == repr(f"{key}-2")
    assert is_free(locks, key)
    assert is_free(locks, f"{key}-2")


@pytest.mark.parametrize("options", ["", "--mode shared", "--slots 2 --capacity 3"])
def test_the_same_lock_in_its_own_cell_is_joined(
    kernel: Kernel, locks: LockClient, key: str, options: str
) -> None:
    cell = kernel.run(
        f"%%dynamo_lock '{key}' {options}\n%%dynamo_lock '{key}' --no-wait {options}\nlease.key"
    )
    assert cell.error is None
    assert cell.outputs[-1]["text"] == repr(key)
    assert is_free(locks, key)


@pytest.mark.parametrize(
    "order",
    ["%%time\n%%dynamo_lock {key}\n", "%%dynamo_lock {key}\n%%time\n"],
    ids=["around the lock", "in the lock"],
)
def test_a_timed_cell(kernel: Kernel, locks: LockClient, key: str, order: str) -> None:
    cell = kernel.run(order.format(key=f"'{key}'") + "print('ran')")
    assert cell.error is None
    assert "ran" in cell.streamed
    assert "Wall time" in cell.streamed
    wait_until_free(locks, key)


def test_help(kernel: Kernel) -> None:
    assert "--wait, --wait-time DURATION" in kernel.run("%dynamo_lock --help").streamed
    assert "[PREFIX]" in kernel.run("%dynamo_locks --help").streamed
    assert kernel.run("%dynamo_lock a").error == "UsageError"
