"""The example notebook in `dags/`, run by hand. tests/test_example_dags.py runs its DAG."""

from __future__ import annotations

import json
from pathlib import Path

from airflow_dynamo_lock import LockClient
from deployments.kernels import Kernel
from tests.notebook.conftest import TABLE

NOTEBOOK = Path(__file__).parents[2] / "dags" / "lock_notebook.ipynb"


def test_the_example_runs_by_hand(environment: dict[str, str], locks: LockClient) -> None:
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    with Kernel({**environment, "DYNAMO_LOCK_TABLE": TABLE}) as kernel:
        done = [kernel.run("".join(each["source"])) for each in cells if each["cell_type"] == "code"]
    assert [each.error for each in done] == [None, None, None]
    record = locks.get("warehouse/customers")
    assert record is not None
    assert done[-1].streamed == f"Repaired under 'warehouse/customers' with token {record.token}.\n"
