"""The optional features of a table format. A format lists its features as data; `require` refuses all others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from enum import Enum
from typing import Any, Protocol

from airflow_dynamo_lock.core.model.claim import Claim
from airflow_dynamo_lock.core.model.errors import LockValueError
from airflow_dynamo_lock.core.model.kind import Kind


class Feature(Enum):
    """What a lock can do in some table formats only. The value completes the sentence "A lock cannot …"."""

    SLOTS = "be shared, or have more than one slot"
    SETS = "be acquired together with others"
    QUEUE = "have a queue, or priorities in it"
    MIN_HOLD = "be held for a minimum time"
    DATA = "keep data"
    FORGET = "be forgotten"
    WAITS = "show what its holder waits for"


ALL_FEATURES = frozenset(Feature)


class HasFeatures(Protocol):
    """The part of a format that says what it supports."""

    @property
    def name(self) -> str:
        """The name that the option `table_format` takes."""
        ...

    @property
    def features(self) -> frozenset[Feature]:
        """The optional features of this format."""
        ...

    def check_data(self, data: Mapping[str, Any]) -> None:
        """Return if the format can store these data.

        :raises LockValueError: it cannot.
        """
        ...


def require(table_format: HasFeatures, feature: Feature) -> None:
    """Return if the format has the feature.

    :raises LockValueError: it does not.
    """
    if feature not in table_format.features:
        raise LockValueError(
            f"In the format {table_format.name!r} a lock cannot {feature.value}: use a table of the format 'native' "
            "for that."
        )


def checked_claim(table_format: HasFeatures, claim: Claim) -> Claim:
    """The claim for a lock of this format. Without queues, no claim waits in one.

    :raises LockValueError: the claim needs a feature that the format does not have.
    """
    for feature, needed in (
        (Feature.SLOTS, claim.kind is not Kind.PLAIN),
        (Feature.MIN_HOLD, claim.min_hold_ms > 0),
        (Feature.QUEUE, claim.priority != 0),
        (Feature.DATA, bool(claim.data)),
    ):
        if needed:
            require(table_format, feature)
    if claim.data:
        table_format.check_data(claim.data)
    return claim if Feature.QUEUE in table_format.features else replace(claim, fair=False)
