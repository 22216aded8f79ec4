"""What all tests share: they never reach AWS, nor an Airflow of this machine."""

from __future__ import annotations

import os
import tempfile

# Before anything is imported that reads them, and for child processes too. Engines take any credentials.
for _name in [name for name in os.environ if name.startswith("AWS_")]:
    del os.environ[_name]
os.environ.update(
    AWS_ACCESS_KEY_ID="test",
    AWS_SECRET_ACCESS_KEY="test-secret",
    AWS_DEFAULT_REGION="eu-central-1",
    AWS_EC2_METADATA_DISABLED="true",
    AWS_CONFIG_FILE=os.devnull,
    AWS_SHARED_CREDENTIALS_FILE=os.devnull,
)
for _name in [name for name in os.environ if name.startswith("AIRFLOW_")]:
    del os.environ[_name]
_home = tempfile.TemporaryDirectory(prefix="airflow-")  # removed at exit
os.environ.update(AIRFLOW_HOME=_home.name, AIRFLOW__CORE__LOAD_EXAMPLES="False")
