"""The results of the matrix: a table of cases and environments, for the terminal and for docs/versions.md."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from xml.etree import ElementTree

from rich.table import Table

from matrix.page import as_markdown, replace_part
from matrix.releases import ROOT, Environment

PAGE = ROOT / "docs" / "versions.md"
# Each test of these modules has a row of its own. The tests of all other modules are counted, in groups.
_CASES = ("tests.airflow.", "tests.test_demo")


@dataclass(frozen=True)
class Case:
    """The result of one test.

    :ivar file: the module, such as ``tests.airflow.test_group``.
    :ivar name: the test function, with its parameters.
    :ivar outcome: ``passed``, ``failed`` or ``skipped``.
    :ivar seconds: the time that the test has measured, or None. It is not the duration of the test.
    """

    file: str
    name: str
    outcome: str
    seconds: str | None


@dataclass(frozen=True)
class Report:
    """The results of the last test run in one environment."""

    environment: Environment

    @property
    def path(self) -> Path:
        """The file with pytest's report, as XML."""
        return self.environment.folder / "report.xml"

    @property
    def output(self) -> Path:
        """The file with pytest's output."""
        return self.environment.folder / "output.txt"

    @cached_property
    def cases(self) -> list[Case]:
        """The results of all tests; empty if there is no report, because pytest was stopped."""
        if not self.path.exists():
            return []
        root = ElementTree.parse(self.path).getroot()  # noqa: S314 - our own file
        return [_case(each) for each in root.iter("testcase")]

    @property
    def passed(self) -> bool:
        """Whether at least one test passed, and none failed."""
        return self.count("passed") > 0 and self.count("failed") == 0

    def count(self, outcome: str) -> int:
        """Return the number of tests with this outcome."""
        return sum(case.outcome == outcome for case in self.cases)

    @property
    def failures(self) -> str:
        """Pytest's account of what failed; its last lines, if it was stopped before it could write one."""
        lines = self.output.read_text(errors="replace").splitlines()
        headings = (number for number, line in enumerate(lines) if line.strip("= ") in ("ERRORS", "FAILURES"))
        return "\n".join(lines[next(headings, -50) :])

    @cached_property
    def cells(self) -> dict[str, str]:
        """The column of this environment in the table: row → result."""
        if not self.cases:
            return {}
        cells = {"Python": self.environment.python_version}
        groups: dict[str, list[str]] = {}
        for case in self.cases:
            if case.file.startswith(_CASES):
                sign = {"passed": "✓", "failed": "FAILED", "skipped": "–"}[case.outcome]
                cells[_in_words(case.name)] = f"{case.seconds} s" if case.seconds and sign == "✓" else sign
            else:
                groups.setdefault(_group(case.file), []).append(case.outcome)
        for group, outcomes in groups.items():
            failed = outcomes.count("failed")
            cells[group] = f"{failed} FAILED" if failed else f"{outcomes.count('passed')} passed"
        return cells


def as_table(reports: Sequence[Report]) -> Table:
    """Return the table for the terminal."""
    table = Table("", *(report.environment.name for report in reports))
    for row in _rows(reports):
        table.add_row(row, *(report.cells.get(row, "not run") for report in reports))
    return table


def write_page(reports: Sequence[Report]) -> None:
    """Write the table into docs/versions.md, between its markers."""
    rows = [[row, *(report.cells.get(row, "not run") for report in reports)] for row in _rows(reports)]
    replace_part(PAGE, "make matrix", as_markdown(["", *(each.environment.name for each in reports)], rows))


def _rows(reports: Sequence[Report]) -> list[str]:
    """Return the rows of all reports, in the order in which they first appear."""
    return list(dict.fromkeys(row for report in reports for row in report.cells))


def _case(element: ElementTree.Element) -> Case:
    kinds = {child.tag for child in element}
    outcome = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
    properties = {each.get("name"): each.get("value") for each in element.iter("property")}
    return Case(element.get("classname", ""), element.get("name", ""), outcome, properties.get("seconds"))


def _in_words(test: str) -> str:
    """Return the row's label: ``test_a_task_fails[a-b]`` becomes ``a task fails (a-b)``."""
    name, _, parameters = test.partition("[")
    words = name.removeprefix("test_").replace("_", " ")
    return f"{words} ({parameters.removesuffix(']')})" if parameters else words


def _group(file: str) -> str:
    """Return the label of the group to which the tests of a module belong."""
    names = {
        "tests.client": "clients",
        "tests.layer": "Airflow layer",
        "tests.cli": "command line",
        "tests.page": "permissions of the Locks page",
        "tests.browser": "Locks page in a browser",
        "tests.test_example_dags": "example DAGs",
        "tests.test_embedded": "embedded DynamoDB",
    }
    return next((name for prefix, name in names.items() if file.startswith(prefix)), "packaging")
