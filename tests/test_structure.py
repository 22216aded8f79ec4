"""The rooms of the package: imports go downwards only, and neither modules nor rooms import each other in a circle."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "airflow_dynamo_lock"

#: The rooms from the bottom up. A room imports from itself and from those below it.
ROOMS = (
    "log",
    "events",
    "defaults",
    "core/model",
    "core/effects",
    "core/liveness",
    "core/table",
    "core/foreign",
    "core/queue",
    "core/wait",
    "core/lock",
    "client",
    "monitoring",
    "embedded",
    "airflow",
    "cli",
    "notebook",
)

#: Longest file of the package and longest class, in lines.
MAX_FILE, MAX_CLASS = 450, 300


def modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield the dotted name of each module below the package, with its syntax tree."""
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if name:
            yield name, ast.parse(path.read_text())


def imports(tree: ast.Module, known: set[str]) -> Iterator[str]:
    """Yield the modules of the package that a module imports, also inside functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("airflow_dynamo_lock."):
            module = (node.module or "").removeprefix("airflow_dynamo_lock.")
            for each in node.names:
                inner = f"{module}.{each.name}"
                yield inner if inner in known else module


def graph() -> Mapping[str, set[str]]:
    """Return for each module the modules that it imports."""
    trees = dict(modules())
    return {name: set(imports(tree, set(trees))) - {name} for name, tree in trees.items()}


def room_of(module: str) -> str:
    path = module.replace(".", "/")
    return next((room for room in ROOMS if path == room or path.startswith(f"{room}/")), "")


def test_no_modules_import_each_other_in_a_circle() -> None:
    try:
        tuple(TopologicalSorter(graph()).static_order())
    except CycleError as circle:
        pytest.fail(" → ".join(circle.args[1]))


def test_every_module_is_in_a_room() -> None:
    assert [module for module in graph() if not room_of(module) and module != "core"] == []


def test_imports_go_downwards() -> None:
    upwards = [
        f"{module} imports {other}"
        for module, others in graph().items()
        for other in others
        if room_of(module) and room_of(other) and ROOMS.index(room_of(other)) > ROOMS.index(room_of(module))
    ]
    assert upwards == []


@pytest.mark.parametrize(
    "path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE))
)
def test_files_and_classes_are_short_enough_to_read(path: Path) -> None:
    text = path.read_text()
    assert text.count("\n") <= MAX_FILE
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ClassDef):
            assert (node.end_lineno or 0) - node.lineno + 1 <= MAX_CLASS, node.name


def below(arrows: Mapping[str, set[str]], start: str) -> set[str]:
    """Return all rooms that can be reached from `start` by one arrow or more."""
    return {end for other in arrows[start] for end in {other} | below(arrows, other)}


def test_the_drawing_of_the_rooms_is_correct() -> None:
    arrows: dict[str, set[str]] = {room: set() for room in ROOMS}
    for module, others in graph().items():
        for other in others:
            if room_of(module) and room_of(other) not in ("", room_of(module)):
                arrows[room_of(module)].add(room_of(other))
    needed = {
        (start, end)
        for start, ends in arrows.items()
        for end in ends
        if not any(end in below(arrows, other) for other in ends - {end})
    }
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    drawing = page.partition("```mermaid\nflowchart")[2].partition("```")[0]
    rooms = {room.rpartition("/")[2]: room for room in ROOMS}
    drawn = re.findall(r"^ *(\w+)(?:\[.*?\])? --> (\w+)", drawing, re.MULTILINE)
    assert {(rooms[start], rooms[end]) for start, end in drawn} == needed
