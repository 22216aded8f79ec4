"""The package's one logger."""

from __future__ import annotations

import logging

log = logging.getLogger("airflow_dynamo_lock")
