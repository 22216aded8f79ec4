"""Division of the parameters of a test between `make test` and `make proof`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some_in_proof(values: Iterable[Any], *in_test: Any) -> list[Any]:
    """Return all values as parameters. `make test` runs only those in `in_test`."""
    return [each if each in in_test else pytest.param(each, marks=pytest.mark.proof) for each in values]
