"""Items that a lock table may contain: good records, damaged ones, those of other programs, and texts of every kind.

All are in DynamoDB's own typed form (``{"S": "text"}``), as the engine stores them and not as this package writes them.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import strategies as st

from airflow_dynamo_lock.core.model.limits import MAX_KEY_BYTES

Attribute = dict[str, Any]
Item = dict[str, Attribute]

NOW_MS = time.time_ns() // 1_000_000
#: A holder whose last heartbeat was long ago is dead. With a heartbeat from tomorrow, it is alive.
LONG_AGO, TOMORROW = NOW_MS - 10**11, NOW_MS + 10**8

# -- texts --------------------------------------------------------------------------------------------------------

_ODD_TEXTS = [
    *(
        "\0",
        "a.b",
        "a[0]",
        "#me",
        ":me",
        "holders.a",
        "#",
        ":",
        ".",
        "[",
        "]",
        "`",
        '"',
        "'",
        "\\",
        "%s",
        "{}",
    ),
    *(
        "e\u0301",
        "\u0301",
        "\u200f",
        "\u202eabc",
        "\u2066x\u2069",
        "\ufeff",
        "\ufffe",
        "\u2028",
        "\n",
        "\r\n",
        " ",
    ),
    *(
        "💡",
        "\U0001f468\u200d\U0001f469",
        "\U00020000",
        "\U000e0001",
        "\U000f0000",
        "\U0010ffff",
        "ß",
        "İ",
        "SELECT",
    ),
]
#: Text from every plane of Unicode that can be stored.
texts = st.sampled_from(_ODD_TEXTS) | st.text(
    st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12
)
#: Text that cannot be stored, because it contains a lone surrogate.
broken_texts = st.builds(
    lambda before, lone, after: before + lone + after,
    st.sampled_from(["", "a"]),
    st.characters(categories=["Cs"]),
    st.sampled_from(["", "b", "💡"]),
)


def _to_length(text: str, size: int) -> str:
    """Repeat the text until it has `size` bytes. The rest is filled with ``x``."""
    width = len(text.encode())
    return text * (size // width) + "x" * (size % width)


#: Keys, some of them of the maximum length.
keys = texts | texts.map(lambda text: _to_length(text, MAX_KEY_BYTES))

# -- values -------------------------------------------------------------------------------------------------------

numbers = st.sampled_from(
    [
        *("0", "-0", "1", "-1", "2", "0.5", "17.5", "-17", "1000000000", "9223372036854775808"),
        *(
            "9" * 38,
            "-" + "9" * 38,
            "1" + "0" * 40,
            "1E+125",
            "9.9E+125",
            "-1E+125",
            "1E-130",
            "0." + "1" * 38,
        ),
        *(str(NOW_MS), str(LONG_AGO), str(TOMORROW), "253402300800000"),
    ]
) | st.integers(-(10**6), 10**6).map(str)

_scalars: st.SearchStrategy[Attribute] = (
    st.builds(lambda text: {"S": text}, texts | st.just(""))
    | st.builds(lambda number: {"N": number}, numbers)
    | st.builds(lambda value: {"B": value}, st.binary(max_size=8))
    | st.sampled_from([{"BOOL": True}, {"BOOL": False}, {"NULL": True}])
    | st.sampled_from([{"SS": ["a", "b"]}, {"NS": ["1", "2.5"]}, {"BS": [b"\0", b"\xff"]}])
)


def _deep(levels: int) -> Attribute:
    value: Attribute = {"S": "the bottom"}
    for level in range(levels):
        value = {"M": {"a": value}} if level % 2 else {"L": [value]}
    return value


#: Any value that DynamoDB stores.
values: st.SearchStrategy[Attribute] = (
    st.recursive(
        _scalars,
        lambda inner: (
            st.builds(lambda each: {"L": each}, st.lists(inner, max_size=3))
            | st.builds(lambda each: {"M": each}, st.dictionaries(texts, inner, max_size=3))
        ),
        max_leaves=4,
    )
    | st.sampled_from([_deep(12), _deep(27)])  # at most 31 levels, with those above this value
    | st.sampled_from([{"M": {}}, {"L": []}])
)

# -- records ------------------------------------------------------------------------------------------------------


def _number(value: int) -> Attribute:
    return {"N": str(value)}


@st.composite
def holders(draw: st.DrawFn) -> Item:
    """A holder as this package writes it, sometimes with an attribute of a later version."""
    holder: Item = {
        "owner": {"S": draw(texts)},
        "slots": _number(draw(st.integers(1, 3))),
        "lease_ms": _number(draw(st.sampled_from([1, 30_000, 10**12]))),
        "version": {"S": draw(texts)},
        "acquired_at": _number(draw(st.sampled_from([0, LONG_AGO, NOW_MS, 253_402_300_799_999]))),
        "processes": {"M": {each: _number(NOW_MS) for each in draw(st.lists(texts, max_size=2))}},
    }
    if renewed_at := draw(st.sampled_from([LONG_AGO, LONG_AGO, TOMORROW, None])):
        holder["renewed_at"] = _number(renewed_at)
    if draw(st.booleans()):
        holder["grace_ms"] = _number(draw(st.sampled_from([1, 15_000])))
    if draw(st.integers(0, 4)) == 0:
        holder["draining"] = {"BOOL": True}
    if draw(st.integers(0, 3)) == 0:
        holder["hold_until"] = _number(draw(st.sampled_from([LONG_AGO, TOMORROW])))
        if draw(st.booleans()):
            holder |= {"draining": {"BOOL": True}, "cooling_down": {"BOOL": True}}
    if draw(st.integers(0, 3)) == 0:
        holder["took_over"] = {"BOOL": True}
    if draw(st.booleans()):
        about = draw(st.dictionaries(texts, texts, max_size=2))
        holder["about"] = {"M": {name: {"S": text} for name, text in about.items()}}
    return holder | _unknown(draw)


@st.composite
def records(draw: st.DrawFn) -> Item:
    """A good record without its key: free, held or partly held, by living and by dead holders."""
    held = draw(st.dictionaries(texts, holders(), max_size=3))
    slots = sum(int(holder["slots"]["N"]) for holder in held.values())
    pinned = draw(st.integers(0, 3)) == 0
    free = draw(st.integers((1 - slots if pinned else 0) if held else 1, 2))
    record: Item = {
        "capacity": _number(slots + free),
        "available": _number(free),
        "holders": {"M": {lease_id: {"M": holder} for lease_id, holder in held.items()}},
        "token": _number(draw(st.sampled_from([1, 17, NOW_MS, -3, 10**15]))),
        "expires_at": _number(NOW_MS // 1000),
    }
    # Without it, a client reads the record before it acquires the lock.
    if draw(st.booleans()):
        record["token_base"] = {"S": draw(st.sampled_from(["unverified", "verified"]))}
    if pinned:
        record["capacity_pinned"] = {"BOOL": True}
    if draw(st.integers(0, 2)) == 0:
        record["last_ticket"] = _number(draw(st.sampled_from([0, 1, 10**15])))
        if draw(st.booleans()):
            record["queue_head"] = {"S": draw(st.just("0999/000000000000001") | texts)}
    if draw(st.booleans()):
        record["data"] = {"M": draw(st.dictionaries(texts, values, max_size=2))}
    return record | _unknown(draw)


def _unknown(draw: st.DrawFn) -> Item:
    return draw(st.dictionaries(texts.map(lambda text: f"?{text}"), values, max_size=1))


@st.composite
def damaged(draw: st.DrawFn) -> Item:
    """A record with random changes. Sometimes it is still a good one."""
    item: Item = copy.deepcopy(draw(records()))
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(item))
        if not places:
            break
        # Half of the time near the top, where most attributes are that clients read.
        near = [place for place in places if place[2] < 3]
        where, name, _ = draw(st.sampled_from(near if draw(st.booleans()) else places))
        match draw(st.sampled_from(["drop", "replace", "number", "add", "swap"])):
            case "drop":
                del where[name]
            case "replace":
                where[name] = copy.deepcopy(draw(values))
            case "number":
                where[name] = {"N": draw(numbers)}
            case "add":
                where[draw(st.sampled_from([*_KNOWN, "?"]))] = copy.deepcopy(draw(values))
            case "swap":
                other, others, _ = draw(st.sampled_from(places))
                if not (_within(other[others], where) or _within(where[name], other)):
                    where[name], other[others] = other[others], where[name]
    return item


_KNOWN = (
    "draining",
    "renewed_at",
    "grace_ms",
    "data",
    "holders",
    "processes",
    "about",
    "slots",
    "version",
    "token",
    "last_ticket",
    "queue_head",
    "capacity_pinned",
    "hold_until",
)

#: Items in the position of a waiter that do not describe one.
no_waiters = st.sampled_from(
    [
        {"note": {"S": "somebody's"}},
        {"lease_id": {"S": "a"}, "owner": {"S": "me"}, "slots": {"S": "many"}, "version": {"S": "v"}},
    ]
) | st.dictionaries(texts, values, min_size=1, max_size=3).map(
    lambda item: {name: value for name, value in item.items() if name not in ("key", "entry")}
)


def _places(item: Item, depth: int = 0) -> Iterator[tuple[Item, str, int]]:
    """Yield each named value: the map that contains it, its name and its depth."""
    for name, attribute in item.items():
        yield item, name, depth
        if "M" in attribute:
            yield from _places(attribute["M"], depth + 1)


def _within(attribute: Attribute, where: Item) -> bool:
    """Whether a map is part of a value, so that a swap would put it into itself."""
    inside = attribute.get("M")
    return inside is not None and (inside is where or any(_within(each, where) for each in inside.values()))


# -- items of other programs --------------------------------------------------------------------------------------

#: Items that other lock libraries, and other programs, would store under the same keys.
FOREIGN: dict[str, Item] = {
    "nothing but its key": {},
    "AmazonDynamoDBLockClient": {
        "ownerName": {"S": "host"},
        "leaseDuration": {"S": "20000"},
        "recordVersionNumber": {"S": "bd2ba1c4-7ab7-4d0c-b43d-5d1d7b1a1c7e"},
        "data": {"B": b"anything"},
    },
    "AmazonDynamoDBLockClient, released": {
        "ownerName": {"S": "host"},
        "leaseDuration": {"S": "20000"},
        "recordVersionNumber": {"S": "bd2ba1c4-7ab7-4d0c-b43d-5d1d7b1a1c7e"},
        "isReleased": {"S": "1"},
    },
    "python-dynamodb-lock": {
        "owner_name": {"S": "host"},
        "lease_duration": {"N": "30"},
        "record_version_number": {"S": "9f2d"},
        "expiry_time": {"N": str(NOW_MS // 1000)},
    },
    "dyndbmutex": {
        "holder": {"S": "__empty__"},
        "expire_ts": {"N": str(NOW_MS)},
        "ttl": {"N": str(NOW_MS // 1000)},
    },
    "awsflock": {
        "lease_id": {"S": "5f0b"},
        "lease_duration": {"N": "7200"},
        "owner": {"S": "me"},
        "expiration_time": {"N": str(NOW_MS // 1000)},
    },
    "Terraform": {"LockID": {"S": "state"}, "Info": {"S": "{}"}, "Digest": {"S": "d41d8cd9"}},
    "ShedLock": {"lockUntil": {"S": "2027-01-15T12:00:00.000Z"}, "lockedBy": {"S": "host"}},
    "a semaphore with a set of holders": {
        "capacity": {"N": "2"},
        "available": {"N": "1"},
        "holders": {"SS": ["a"]},
        "token": {"N": "1"},
    },
}

foreign = st.sampled_from(list(FOREIGN.values())) | st.dictionaries(texts, values, max_size=4).map(
    lambda item: {name: value for name, value in item.items() if name not in ("key", "entry")}
)


def of_many(count: int, filler: int, damage: Callable[[Item], object] | None = None) -> Item:
    """Return a semaphore with `count` holders, each with `filler` bytes in its `about`.

    :param damage: changes the first holder.
    """
    held: dict[str, Attribute] = {}
    for index in range(count):
        held[f"lease-{index:05d}"] = {
            "M": {
                "owner": {"S": "north/dag/run/task"},
                "slots": {"N": "1"},
                "lease_ms": {"N": "30000"},
                "grace_ms": {"N": "15000"},
                "version": {"S": f"v{index}"},
                "acquired_at": _number(LONG_AGO),
                "renewed_at": _number(LONG_AGO if index % 2 else TOMORROW),
                "processes": {"M": {}},
                "about": {"M": {"note": {"S": "x" * filler}}},
            }
        }
    if damage is not None:
        damage(next(iter(held.values()))["M"])
    return {
        "capacity": _number(count + 1),
        "available": {"N": "1"},
        "holders": {"M": held},
        "token": {"N": "17"},
        "expires_at": _number(NOW_MS // 1000),
    }
