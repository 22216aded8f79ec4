"""The metrics of tables, read by Prometheus's own parser of OpenMetrics."""

from __future__ import annotations

from prometheus_client.openmetrics.parser import text_string_to_metric_families

from airflow_dynamo_lock.core.model.decisions import Loss
from airflow_dynamo_lock.core.model.state import LockState
from airflow_dynamo_lock.monitoring.openmetrics import exposition
from tests.monitoring.test_checks import MIN, NOW, a_state, a_waiter, held

Samples = dict[tuple[str, str, str], float]


def samples(tables: dict[str, list[LockState]], keys: int = 0) -> Samples:
    """Return the samples: name, table and key → value."""
    return {
        (
            sample.name.removeprefix("dynamo_lock_"),
            sample.labels["table"],
            sample.labels.get("key", ""),
        ): sample.value
        for family in text_string_to_metric_families(exposition(tables, keys))  # type: ignore[no-untyped-call]
        for sample in family.samples
    }


def test_a_table_has_the_figures_of_all_of_its_locks() -> None:
    locks = [
        a_state(key="free", last_loss=Loss("a", "north", NOW - MIN, broken=False)),
        a_state(a_waiter(since_ms=NOW - 1500), a_waiter("east"), key="busy", holders=held(NOW - 3 * MIN)),
        a_state(key="held", holders=held(NOW - MIN, renewed_at_ms=NOW - 4250)),
    ]
    assert samples({"airflow_locks": locks}) == {
        ("up", "airflow_locks", ""): 1,
        ("damaged", "airflow_locks", ""): 0,
        ("locks", "airflow_locks", ""): 3,
        ("held", "airflow_locks", ""): 2,
        ("holders", "airflow_locks", ""): 2,
        ("waiting", "airflow_locks", ""): 2,
        ("longest_held_seconds", "airflow_locks", ""): 180,
        ("longest_wait_seconds", "airflow_locks", ""): 1.5,
        ("oldest_heartbeat_seconds", "airflow_locks", ""): 4.25,
        ("last_loss_timestamp_seconds", "airflow_locks", ""): (NOW - MIN) / 1000,
    }


def test_an_empty_table_has_zeros_and_no_loss() -> None:
    found = samples({"airflow_locks": []})
    assert found.pop(("up", "airflow_locks", "")) == 1
    assert set(found.values()) == {0}
    assert ("last_loss_timestamp_seconds", "airflow_locks", "") not in found


def test_several_tables_share_their_metrics() -> None:
    found = samples({"one": [a_state()], "two": []})
    assert (found["locks", "one", ""], found["locks", "two", ""]) == (1, 0)


def test_only_a_limited_number_of_locks_has_metrics_and_only_those_in_use() -> None:
    locks = [
        a_state(key="free"),
        a_state(key="b", holders=held(NOW - MIN)),
        a_state(key="a", holders=held(NOW - 2 * MIN)),
        a_state(a_waiter(since_ms=NOW - 500), key="z", holders=held(NOW)),
    ]
    found = samples({"t": locks}, keys=2)
    assert {key for _, _, key in found if key} == {"z", "a"}
    assert found["key_waiting", "t", "z"] == 1
    assert found["key_wait_seconds", "t", "z"] == 0.5
    assert found["key_holders", "t", "a"] == 1
    assert found["key_held_seconds", "t", "a"] == 120


def test_every_valid_key_is_a_valid_label() -> None:
    names = ['quote"', "back\\slash", "new\nline", "\\n", "ümläut", "a,b=c{}"]
    found = samples({"t": [a_state(key=name, holders=held(NOW)) for name in names]}, keys=10)
    assert {key for _, _, key in found if key} == set(names)
