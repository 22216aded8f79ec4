"""A notebook in a guarded task enters the lease of its own run, and is stopped with its task."""

from __future__ import annotations

import pytest

from proof.airflow.testbed import GRACE, POLL, Testbed, wait_for
from tests.airflow.test_group import AIRFLOW, KILL, Contend
from tests.airflow.test_group import contend as contend

pytestmark = pytest.mark.proof
pytest.importorskip("airflow.providers.papermill", reason="needs the papermill provider")


def test_a_notebook_joins_the_lease_of_its_own_run(testbed: Testbed, key: str, contend: Contend) -> None:
    runs = contend(dag_id="notebook")
    record = testbed.locks.get(key)
    assert record is not None
    (holder,) = record.holders.values()
    assert runs.holder.lease_id == holder.lease_id
    assert len(holder.processes) == 2, "the task's process and the notebook's"

    testbed.end_task(runs.first, "finish")

    runs.handed_over(POLL + AIRFLOW)
    runs.finish("success")
    assert len({use.lease_id for use in testbed.uses(key) if use.run_id == runs.first}) == 1


def test_a_notebook_ends_before_the_lock_of_its_marked_task_is_handed_over(
    testbed: Testbed, contend: Contend
) -> None:
    runs = contend(dag_id="notebook")
    testbed.airflow.set_task_state("notebook", runs.first, "lock.work", "failed")
    runs.handed_over(GRACE + POLL + AIRFLOW)
    runs.finish("failed")


def test_a_notebook_ends_before_the_lock_of_its_cleared_task_is_handed_over(
    testbed: Testbed, key: str, contend: Contend
) -> None:
    runs = contend(dag_id="notebook")
    testbed.airflow.clear("notebook", runs.first, ["lock.work"])
    wait_for(
        lambda: [use for use in testbed.uses(key) if use.pid != runs.holder.pid] or None,
        "another process is inside",
        KILL + GRACE + POLL + AIRFLOW,
    )
    testbed.end_task(runs.first, "finish")
    runs.finish("success")
