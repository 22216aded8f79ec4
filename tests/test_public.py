"""The package exports the classes that its public methods return, and the clients document their methods."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import airflow_dynamo_lock

PUBLIC = {name: getattr(airflow_dynamo_lock, name) for name in airflow_dynamo_lock.__all__}
CLASSES = {
    node.name
    for path in (Path(__file__).parents[1] / "airflow_dynamo_lock").rglob("*.py")
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.ClassDef)
}


def functions(public: Any) -> Iterator[Any]:
    """Yield a public function, or the functions of a class's public methods and properties."""
    members = [public]
    if inspect.isclass(public):
        members = [each for name, each in inspect.getmembers(public) if not name.startswith("_")]
    for member in members:
        function = member.fget if isinstance(member, property) else inspect.unwrap(member)
        function = getattr(function, "__func__", function)
        if getattr(function, "__module__", "").startswith("airflow_dynamo_lock"):
            yield function


@pytest.mark.parametrize("name", PUBLIC)
def test_returned_classes_are_exported(name: str) -> None:
    for function in functions(PUBLIC[name]):
        returned = getattr(function, "__annotations__", {}).get("return", "")
        assert set(re.findall(r"\w+", str(returned))) & CLASSES <= PUBLIC.keys(), function.__qualname__


@pytest.mark.parametrize("name", ["LockClient", "AsyncLockClient"])
def test_the_methods_of_the_clients_describe_their_parameters(name: str) -> None:
    for function in functions(PUBLIC[name]):
        signature = inspect.signature(function).parameters.keys() - {"self"}
        kept = {"claim"} if function.__name__ in ("try_acquire", "acquire") else set()  # see `ClaimOptions`
        described = set(re.findall(r"^ *:param (\w+):", function.__doc__ or "", re.MULTILINE))
        assert described == signature - kept, function.__qualname__


@pytest.mark.parametrize("name", ["LockClient", "AsyncLockClient"])
@pytest.mark.parametrize("method", ["acquire", "lock"])
@pytest.mark.parametrize(
    "error", ["LockTimeoutError", "LockDeadlockError", "LockRemovedError", "LockNotFoundError"]
)
def test_the_methods_that_wait_document_how_a_wait_may_end(name: str, method: str, error: str) -> None:
    assert f":raises {error}: " in inspect.unwrap(getattr(PUBLIC[name], method)).__doc__
