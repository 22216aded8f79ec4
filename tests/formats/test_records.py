"""Any item of a foreign table is read as a lock that can be described and judged, or as one typed error."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from airflow_dynamo_lock import LockRecordError
from airflow_dynamo_lock.core.effects import Reply
from airflow_dynamo_lock.core.foreign.item import OURS
from airflow_dynamo_lock.core.foreign.registry import format_of
from airflow_dynamo_lock.core.foreign.s3_requests import OURS as OURS_IN_S3
from airflow_dynamo_lock.core.foreign.s3_requests import _parse_object
from airflow_dynamo_lock.core.liveness import Observer
from airflow_dynamo_lock.core.table.codec import encode
from tests.formats import items
from tests.formats.conftest import FOREIGN
from tests.fuzz.conftest import examples

texts = st.text(max_size=5) | st.sampled_from(["1", "0", "-1", "9" * 30, "9" * 5000, "1e9", "²", "__empty__"])
numbers = st.sampled_from([0, -1, 1, 0.5, 10**15, 10**37, 1e100]) | st.integers(-5, 10**13)
values = texts | numbers | st.booleans() | st.none() | st.binary(min_size=1, max_size=3)
maps: Any = st.dictionaries(
    st.sampled_from(
        ["lease_id", "mark", "owner", "slots", "lease_ms", "version", "acquired_at", "processes"]
    ),
    values | st.just({}),
)


def check_record(record: Any) -> None:
    record.describe()
    reply = Reply({}, 100.0, 100.0, server_ms=1_800_000_000_000)
    observer = Observer()
    observer.see(record, reply)
    assert observer.next_death(record, reply) > 0


@examples(300)
@given(data=st.data(), format=st.sampled_from([name for name in FOREIGN if name != "s3"]))
def test_any_item_is_a_lock_or_one_error(data: st.DataObject, format: str) -> None:
    item = items.key_of(format, "k") | items.held(format)
    for name in data.draw(st.sets(st.sampled_from([*items.held(format), "isReleased", OURS]))):
        value = data.draw(maps | values if name == OURS else values)
        item[name] = encode(value)
    if data.draw(st.booleans()):
        item.pop(data.draw(st.sampled_from(list(items.held(format)))), None)
    message = ""
    try:
        check_record(format_of(format, "table", 10_000).record(item, 1_800_000_000_000))
    except LockRecordError as damaged:
        message = str(damaged)
    assert not message or "'k'" in message
    assert len(message.splitlines()) <= 1


@examples(300)
@given(data=st.data())
def test_any_object_is_a_lock_or_one_error(data: st.DataObject) -> None:
    lock = items.held("s3")
    times = st.sampled_from(
        ["0001-01-01T00:00:00+00:00", "9999-12-31T23:59:59+00:00", "2026-01-01T00:00:00", ""]
    )
    texts_of_json = texts | numbers | st.booleans() | st.none() | times | st.just(math.inf)
    for name in data.draw(st.sets(st.sampled_from([*lock, "more"]))):
        lock[name] = data.draw(texts_of_json)
    body = data.draw(st.just(json.dumps(lock).encode()) | st.binary(max_size=5) | st.just(b"[" * 5000))
    metadata = data.draw(st.just({}) | st.builds(lambda text: {OURS_IN_S3: text}, st.text(max_size=5)))
    found = _parse_object("k", "bucket", {"Body": body, "Metadata": metadata})
    form = format_of("s3", "bucket", 10_000)
    if isinstance(found, LockRecordError):
        assert len(str(found).splitlines()) == 1
        with pytest.raises(LockRecordError):
            form.record({"key": "k", "lock": found}, None)
    else:
        check_record(form.record({"key": "k", "lock": found}, 1_800_000_000_000))
