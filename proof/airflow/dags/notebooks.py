"""A notebook that locks its cell, run by a guarded task. The DAG exists where the papermill provider is installed."""

from __future__ import annotations

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from airflow.sdk import DAG

from airflow_dynamo_lock import DynamoLock

if find_spec("airflow.providers.papermill"):
    from airflow.providers.papermill.operators.papermill import PapermillOperator

    def keep_files_in_test_folder(context: Any) -> None:
        """Jupyter leaves the connection file of a kernel in the temporary folder if the kernel's task is killed."""
        tempfile.tempdir = os.environ["DYNAMO_LOCK_TEST_FOLDER"]

    options: Any = {"lease": 20, "release_grace": 6}
    with DAG("notebook", schedule=None), DynamoLock("{{ dag_run.conf['key'] }}", **options):
        PapermillOperator(
            task_id="work",
            input_nb=str(Path(__file__).with_name("locked.ipynb")),
            output_nb=f"{os.environ['DYNAMO_LOCK_TEST_FOLDER']}/{{{{ run_id | replace(':', '_') }}}}.ipynb",
            kernel_name="python3",
            pre_execute=keep_files_in_test_folder,
            parameters={
                "key": "{{ dag_run.conf['key'] }}",
                "dag_id": "{{ dag.dag_id }}",
                "run_id": "{{ run_id }}",
                "task_id": "{{ ti.task_id }}",
                "try_number": "{{ ti.try_number }}",
            },
        )
