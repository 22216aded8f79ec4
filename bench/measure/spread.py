"""Summaries of repeated measurements."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import Any


def spread(values: Sequence[float], digits: int = 2) -> dict[str, Any]:
    """Return the minimum, the median, the maximum and the number of the values."""
    return {
        "min": round(min(values), digits),
        "median": round(median(values), digits),
        "max": round(max(values), digits),
        "of": len(values),
    }


def percentile(values: Sequence[float], share: float) -> float:
    """Return a percentile, without interpolation.

    :param share: 0.99 for the 99th percentile.
    """
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]
