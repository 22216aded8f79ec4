"""The Grafana dashboard and the Prometheus rules in ``deploy/``: they are well-formed, and use metrics that exist.

A parser of PromQL reads each expression. Nothing here displays the dashboard in Grafana.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from typing import Any

import promql_parser
import pytest
import yaml

from airflow_dynamo_lock.core.model.decisions import Loss
from airflow_dynamo_lock.monitoring.openmetrics import exposition
from tests.monitoring.test_checks import NOW, a_state, a_waiter, held

DEPLOY = Path(__file__).parents[2] / "deploy"
DASHBOARD: dict[str, Any] = json.loads((DEPLOY / "grafana" / "dashboard.json").read_text())
PANELS: list[dict[str, Any]] = DASHBOARD["panels"]
ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((DEPLOY / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
ALERT_TESTS: list[dict[str, Any]] = yaml.safe_load((DEPLOY / "prometheus" / "alerts_test.yml").read_text())[
    "tests"
]
DATA_SOURCE = {"type": "prometheus", "uid": "${datasource}"}

#: Names of all metrics that `exposition` writes.
METRICS = set(
    re.findall(
        r"^# TYPE (\w+) gauge$",
        exposition(
            {"t": [a_state(a_waiter(), holders=held(NOW), last_loss=Loss("a", "b", NOW, broken=True))]}, 1
        ),
        re.MULTILINE,
    )
)


def panels_of(*types: str) -> list[dict[str, Any]]:
    return [panel for panel in PANELS if panel["type"] in types]


def expressions() -> Iterator[tuple[str, str]]:
    """The place and the text of each expression."""
    for panel in PANELS:
        yield from ((panel["title"], target["expr"]) for target in panel.get("targets", []))
    yield from ((rule["alert"], rule["expr"]) for rule in ALERTS)


def metrics_in(node: Any) -> set[str]:
    """The names of the metrics in a parsed expression."""
    match node:
        case promql_parser.VectorSelector():
            return {str(node.name)}
        case promql_parser.BinaryExpr():
            return metrics_in(node.lhs) | metrics_in(node.rhs)
        case promql_parser.AggregateExpr() | promql_parser.ParenExpr():
            return metrics_in(node.expr)
        case promql_parser.Call():
            return {name for each in node.args for name in metrics_in(each)}
        case promql_parser.NumberLiteral():
            return set()
    raise AssertionError(f"this test does not support the expression {node}")


@pytest.mark.parametrize(("place", "text"), list(expressions()))
def test_each_expression_parses_and_uses_metrics_that_exist(place: str, text: str) -> None:
    used = metrics_in(promql_parser.parse(text))
    assert used
    assert used <= METRICS, place


def test_a_misspelled_expression_is_found() -> None:
    with pytest.raises(ValueError, match="parenthesis"):
        promql_parser.parse("max by (table) (dynamo_lock_held")
    assert metrics_in(promql_parser.parse("time() - max(dynamo_lock_hold) > 1")) == {"dynamo_lock_hold"}


def test_the_dashboard_shows_every_metric() -> None:
    shown = {name for _, text in expressions() for name in metrics_in(promql_parser.parse(text))}
    assert shown == METRICS


def test_each_panel_has_a_title_a_description_and_an_id_of_its_own() -> None:
    for panel in PANELS:
        assert panel["title"], panel["id"]
        assert panel["description"].endswith("."), panel["title"]
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)
    assert len({panel["title"] for panel in PANELS}) == len(PANELS)


def test_the_panels_are_in_the_grid_and_do_not_overlap() -> None:
    cells = {}
    for panel in PANELS:
        x, y, width, height = (panel["gridPos"][name] for name in "xywh")
        assert 0 <= x < x + width <= 24, panel["title"]
        cells[panel["title"]] = {(x + i, y + j) for i in range(width) for j in range(height)}
    for one, other in combinations(cells, 2):
        assert not cells[one] & cells[other], (one, other)


def test_each_panel_reads_from_the_chosen_data_source_and_table() -> None:
    variables = {each["name"]: each for each in DASHBOARD["templating"]["list"]}
    assert (variables["datasource"]["type"], variables["datasource"]["query"]) == ("datasource", "prometheus")
    assert variables["table"]["datasource"] == DATA_SOURCE
    metric, label = re.fullmatch(r"label_values\((\w+), (\w+)\)", variables["table"]["definition"]).groups()  # type: ignore[union-attr]
    assert (metric in METRICS, label) == (True, "table")
    for panel in panels_of("stat", "timeseries", "table"):
        assert panel["datasource"] == DATA_SOURCE, panel["title"]
        refs = [target["refId"] for target in panel["targets"]]
        assert len(set(refs)) == len(refs) > 0, panel["title"]
        for target in panel["targets"]:
            assert target["expr"].count('{table=~"$table"}') == 1, panel["title"]


def test_times_have_the_unit_seconds_and_numbers_have_none() -> None:
    for panel in panels_of("stat", "timeseries"):
        kinds = {"seconds" in target["expr"] for target in panel["targets"]}
        assert len(kinds) == 1, panel["title"]
        wanted = "s" if kinds == {True} else "none"
        assert panel["fieldConfig"]["defaults"]["unit"] == wanted, panel["title"]


def test_the_columns_of_times_in_a_table_have_the_unit_seconds() -> None:
    for panel in panels_of("table"):
        names = next(each["options"]["renameByName"] for each in panel["transformations"][1:])
        units = {each["matcher"]["options"]: each["properties"] for each in panel["fieldConfig"]["overrides"]}
        for target in panel["targets"]:
            assert target["format"] == "table"
            column = names[f"Value #{target['refId']}"]
            assert (column in units) == ("seconds" in target["expr"]), column
        assert all(each == [{"id": "unit", "value": "s"}] for each in units.values())


def test_each_alert_has_tests_of_when_it_fires_and_when_it_does_not() -> None:
    for rule in ALERTS:
        tests = [
            case
            for test in ALERT_TESTS
            for case in test["alert_rule_test"]
            if case["alertname"] == rule["alert"]
        ]
        assert {bool(case["exp_alerts"]) for case in tests} == {True, False}, rule["alert"]
    series = {each["series"].partition("{")[0] for test in ALERT_TESTS for each in test["input_series"]}
    assert series <= METRICS
