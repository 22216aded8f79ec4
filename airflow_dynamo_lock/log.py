"""The logger that all modules of the package use, named ``airflow_dynamo_lock``."""

from __future__ import annotations

import logging

log = logging.getLogger("airflow_dynamo_lock")
