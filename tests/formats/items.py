"""The items that other libraries write, as the description of their formats says."""

from __future__ import annotations

import json
import time
import uuid
from datetime import UTC, datetime, timedelta
from typing import Any

from botocore.exceptions import ClientError

from tests.formats.conftest import Place

Item = dict[str, Any]

KEYS = {
    "amazon-lock-client": "key",
    "python-dynamodb-lock": "lock_key",
    "dyndbmutex": "lockname",
    "awsflock": "lock_id",
}


def key_of(format: str, key: str) -> Item:
    """Return the key attributes of a lock."""
    sort = {"sort_key": {"S": "-"}} if format == "python-dynamodb-lock" else {}
    return {KEYS[format]: {"S": key}, **sort}


def held(format: str, *, lease: float = 30.0, ago: float = 0.0) -> Any:
    """Return a lock that a foreign client acquired or renewed `ago` seconds ago."""
    now = time.time() - ago
    match format:
        case "amazon-lock-client":
            return {
                "ownerName": {"S": "theirs"},
                "leaseDuration": {"S": str(round(lease * 1000))},
                "recordVersionNumber": {"S": str(uuid.uuid4())},
                "data": {"B": b"their data"},
                "team": {"S": "an attribute of their own"},
            }
        case "python-dynamodb-lock":
            return {
                "owner_name": {"S": "theirs"},
                "lease_duration": {"N": f"{lease:g}"},
                "record_version_number": {"S": str(uuid.uuid4())},
                "expiry_time": {"N": str(int(now + 3600))},
                "team": {"S": "an attribute of their own"},
            }
        case "dyndbmutex":
            return {
                "holder": {"S": "theirs"},
                "expire_ts": {"N": str(round((now + lease) * 1000))},
                # As the library writes it: far too late.
                "ttl": {"N": str(round((now + lease) * 1000) + 172_800)},
            }
        case "awsflock":
            return {
                "lease_id": {"S": str(uuid.uuid4())},
                "owner": {"S": "theirs"},
                "lease_duration": {"N": str(round(lease))},
                "expiration_time": {"N": str(int(now + lease))},
            }
    taken = datetime.now(UTC) - timedelta(seconds=ago)
    return {"expire": round(lease), "lock_time": taken.isoformat(), "release_time": None, "owner": "theirs"}


def released(format: str) -> Any:
    """Return a lock that a foreign client has released; None if a release deletes the item."""
    match format:
        case "amazon-lock-client":
            return held(format) | {"isReleased": {"S": "1"}}
        case "dyndbmutex":
            return {"holder": {"S": "__empty__"}, "expire_ts": {"N": "0"}}
        case "s3":
            return held(format) | {"owner": None, "release_time": datetime.now(UTC).isoformat()}
    return None


def damaged(format: str) -> Any:
    """Return an item that is no valid lock."""
    if format == "s3":
        return {"expire": 30, "owner": "theirs"}
    damage = {
        "amazon-lock-client": {"leaseDuration": {"S": "soon"}},
        "python-dynamodb-lock": {"lease_duration": {"S": "30"}},
        "dyndbmutex": {"expire_ts": {"S": "never"}},
        "awsflock": {"expiration_time": {"BOOL": True}},
    }
    return held(format) | damage[format]


def put(place: Place, key: str, item: Any) -> None:
    """Write an item without a condition, in place of the other library."""
    if place.format == "s3":
        place.sdk.put_object(
            Bucket=place.table, Key=key, Body=json.dumps(item), ContentType="application/json"
        )
    else:
        place.sdk.put_item(TableName=place.table, Item={**key_of(place.format, key), **item})


def stored(place: Place, key: str) -> Any:
    """Return the stored item without its key; None if there is none."""
    if place.format == "s3":
        try:
            return json.loads(place.sdk.get_object(Bucket=place.table, Key=key)["Body"].read())
        except ClientError:
            return None
    names = key_of(place.format, key)
    item = place.sdk.get_item(TableName=place.table, Key=names, ConsistentRead=True).get("Item")
    return None if item is None else {name: value for name, value in item.items() if name not in names}


def empty(place: Place) -> None:
    """Delete all locks of the table, for a test that uses all of them."""
    if place.format == "s3":
        for page in place.sdk.get_paginator("list_objects_v2").paginate(Bucket=place.table):
            for each in page.get("Contents", ()):
                place.sdk.delete_object(Bucket=place.table, Key=each["Key"])
        return
    keys = [
        each["AttributeName"]
        for each in place.sdk.describe_table(TableName=place.table)["Table"]["KeySchema"]
    ]
    for page in place.sdk.get_paginator("scan").paginate(TableName=place.table):
        for item in page["Items"]:
            place.sdk.delete_item(TableName=place.table, Key={name: item[name] for name in keys})
