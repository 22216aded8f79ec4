"""A task that runs a notebook, whose locked cell joins the lease of the group. By hand, the cell waits for the lock.

The notebook is lock_notebook.ipynb. The task needs papermill and ipykernel on the workers; without them it is skipped.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from airflow.sdk import DAG, task

from airflow_dynamo_lock import DynamoLock

NOTEBOOK = Path(__file__).with_suffix(".ipynb")


@task.skip_if(lambda _: not (find_spec("papermill") and find_spec("ipykernel")))
@task
def repair() -> str:
    import papermill

    done = papermill.execute_notebook(
        NOTEBOOK,
        None,  # or the path of a file, to keep the notebook with its outputs
        parameters={"conn_id": "dynamo_lock_default"},
        kernel_name="python3",
    )
    return done.cells[-1].outputs[-1]["text"]


with (
    DAG("dynamo_lock_notebook", schedule=None, doc_md=__doc__),
    DynamoLock("warehouse/customers", timeout=600),
):
    repair()
