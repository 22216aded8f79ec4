"""Which parameters of a test `make test` has, and which only `make proof`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def some_in_proof(values: Iterable[Any], *in_test: Any) -> list[Any]:
    """All values, as parameters. `make test` only has those that are named."""
    return [each if each in in_test else pytest.param(each, marks=pytest.mark.proof) for each in values]
