"""The lock table of the tests of the Airflow layer. These tests run on one release of Airflow only."""

from __future__ import annotations

from tests.layer.conftest import connection as connection
from tests.layer.conftest import locks as locks
