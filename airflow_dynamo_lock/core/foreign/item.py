"""The item of a lock in another library's DynamoDB table: what the formats differ in, and how it is written."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from airflow_dynamo_lock.core.effects import Operation, Request, Stamp, T
from airflow_dynamo_lock.core.foreign.one_holder import OneHolder
from airflow_dynamo_lock.core.model.arguments import checked_key
from airflow_dynamo_lock.core.model.errors import LockRecordError, LockValueError
from airflow_dynamo_lock.core.model.record import Holder, LockRecord
from airflow_dynamo_lock.core.table.codec import decode, encode
from airflow_dynamo_lock.core.table.expressions import OVERTAKEN_MS, placeholders
from airflow_dynamo_lock.core.table.items import read_holder
from airflow_dynamo_lock.core.table.reads import TableReads

#: The attribute of an item in a foreign table that only we write.
OURS = "airflow_dynamo_lock"


@dataclass(frozen=True)
class Expiry:
    """An attribute that says when a lease, or an item, runs out: a time, plus the lease.

    :ivar base: what is added to the lease.
    :ivar unit_ms: 1 if it is in milliseconds, 1000 if in seconds.
    """

    attribute: str
    base: int
    unit_ms: int

    def after(self, lease_ms: int) -> int:
        """For a lease of that length."""
        return self.base + -(-lease_ms // self.unit_ms)

    @property
    def lease(self) -> str:
        """The lease that the item shows, in that unit."""
        return "#ours.#lease_ms" if self.unit_ms == 1 else "#ours.#lease_s"


@dataclass(frozen=True)
class ForeignItem(TableReads, OneHolder):
    """The DynamoDB table of another lock library.

    :ivar max_clock_skew_ms: by how much longer than they are counted on leases are, where others go by the clock.
    :ivar partition_key: the name of that key.
    :ivar sort_key: the same; empty if the table has none. Then a lock's name is the partition key. Else it may be
        ``partition key::sort key``; without ``::`` its sort key is `plain_sort`.
    """

    table: str
    max_clock_skew_ms: int
    partition_key: str = ""
    sort_key: str = ""
    service: str = field(default="dynamodb", init=False)

    #: What the sort key of a lock is whose name has none.
    plain_sort: ClassVar[str] = "-"
    #: The attribute that another holder never leaves as it was.
    mark: ClassVar[str]
    #: Whether it is another one after each sign of life, too.
    renewed: ClassVar[bool] = True
    default_partition_key: ClassVar[str]
    default_sort_key: ClassVar[str] = ""
    ttl_attribute: ClassVar[str | None] = None
    #: In which a lock can be seen to be free: a condition, with its values.
    free: ClassVar[tuple[str, Mapping[str, Any]]] = ("attribute_not_exists(#pk)", {})
    #: The attributes that only a free lock has.
    cleared: ClassVar[Sequence[str]] = ()

    def __post_init__(self) -> None:
        if not self.partition_key:
            object.__setattr__(self, "partition_key", self.default_partition_key)
        if not self.sort_key:
            object.__setattr__(self, "sort_key", self.default_sort_key)

    @abstractmethod
    def foreign(self, values: Mapping[str, Any]) -> Holder | None:
        """Who holds the lock, if none of us does.

        :raises TypeError, ValueError: that cannot be told.
        """

    @abstractmethod
    def marked(self, owner: str, lease_id: str, stamp: Stamp) -> str:
        """The `mark` of a lease of ours."""

    def taken(self, owner: str, lease_ms: int) -> Mapping[str, Any]:
        """What a holder writes besides his mark."""
        return {}

    def lasting(self, lease_ms: int) -> Mapping[str, Any]:
        """What says how long the lease is."""
        return {}

    def expiries(self, stamp: Stamp) -> Sequence[Expiry]:
        """What says when it ends, and when DynamoDB may delete it."""
        return ()

    def unchanged(self, dead: Holder) -> tuple[str, Mapping[str, Any]]:
        """That a foreign holder is as he was seen: a condition, with its values."""
        return f"#{self.mark} = :seen_mark", {":seen_mark": dead.version}

    def emptied(self, stamp: Stamp) -> Mapping[str, Any] | None:
        """What stands in a free lock's item; None if there is none."""
        return None

    def kept(self, data: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """The attributes that the data of a lock are in."""
        return {}

    def data_of(self, values: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The data of a lock."""
        return None

    def no_data(self, data: Mapping[str, Any] | None) -> list[str]:
        """What is to be removed for an empty map of data."""
        return []

    @property
    def keys(self) -> Sequence[tuple[str, str, str]]:
        """See `Format`."""
        sort = [(self.sort_key, "RANGE", "S")] if self.sort_key else []
        return [(self.partition_key, "HASH", "S"), *sort]

    def checked_key(self, key: str) -> str:
        """See `Format`."""
        partition, _, sort = checked_key(key).partition("::")
        if self.sort_key and (not partition or (sort == self.plain_sort) or key.endswith("::")):
            raise LockValueError(
                f"A lock in the table {self.table!r} is named 'partition key::sort key', or by the partition key alone "
                f"if the sort key is {self.plain_sort!r}; {key!r} is neither."
            )
        return key

    def carry_out(self, operation: Operation[T]) -> Operation[T]:
        """See `Format`."""
        return operation

    def item_key(self, key: str) -> Mapping[str, Any]:
        """See `TableReads`."""
        if not self.sort_key:
            return {self.partition_key: encode(key)}
        partition, _, sort = key.partition("::")
        return {self.partition_key: encode(partition), self.sort_key: encode(sort or self.plain_sort)}

    def name_of(self, item: Mapping[str, Any]) -> str:
        """See `TableReads`."""
        partition = str(item.get(self.partition_key, {}).get("S", "?"))
        sort = str(item.get(self.sort_key, {}).get("S", self.plain_sort))
        return partition if sort == self.plain_sort else f"{partition}::{sort}"

    def record(self, item: Mapping[str, Any], server_ms: int | None) -> LockRecord:
        """The lock that an item shows.

        :raises LockRecordError: it shows none.
        """
        try:
            values = {name: decode(attribute) for name, attribute in item.items()}
            holder = self._holder(values)
            if any(item[name] != value for name, value in self.item_key(self.name_of(item)).items()):
                raise ValueError("its keys have no name, for there is '::' in the partition key")
        except (TypeError, ValueError, KeyError, OverflowError, RecursionError) as wrong:
            why = f"{wrong} is missing" if isinstance(wrong, KeyError) else str(wrong)
            raise LockRecordError(
                f"The item of the lock {self.name_of(item)!r} in table {self.table!r} is not one of the format "
                f"{self.name!r} ({why}); it was left as it is: check the format, or look at the item before you delete "
                "it."
            ) from wrong
        return LockRecord(
            self.name_of(item),
            capacity=1,
            available=0 if holder else 1,
            holders={holder.lease_id: holder} if holder else {},
            token=0,
            data=self.data_of(values),
            read_at_ms=server_ms,
        )

    def _holder(self, values: Mapping[str, Any]) -> Holder | None:
        ours = values.get(OURS)
        if isinstance(ours, dict) and ours.get("mark") == values.get(self.mark) and ours.get("mark"):
            return read_holder(ours["lease_id"], ours)
        return self.foreign(values)

    def _unchanged(self, holder: Holder) -> tuple[str, Mapping[str, Any]]:
        if not holder.ours:
            return self.unchanged(holder)
        return f"#ours.#version = :seen AND {self._mine}", {":seen": holder.version, ":me": holder.lease_id}

    @property
    def _mine(self) -> str:
        """That the lock is held by a lease of ours, `:me`."""
        return f"#ours.#lease_id = :me AND #{self.mark} = #ours.#mark"

    def _renewal(
        self,
        key: str,
        lease_id: str,
        stamp: Stamp,
        seen: str | None,
        condition: str = "",
        *,
        sets: Mapping[str, Any] | None = None,
        lease_ms: int | None = None,
        data: Mapping[str, Any] | None = None,
        process: str = "",
    ) -> Request:
        """A write that gives the lease a new version; `native` tells what it must not do when it arrives late.

        :param sets: in our own attribute.
        :param lease_ms: how long the lease is from then on, if that changes.
        """
        stamped = stamp.server_ms is not None
        if seen is not None:
            order = " AND #ours.#version = :seen"
        else:
            order = " AND #ours.#renewed_at <= :no_newer" if stamped else ""
        ours = {
            "version": stamp.version,
            **({"renewed_at": stamp.server_ms} if stamped else {}),
            **(sets or {}),
        }
        theirs: dict[str, Any] = {**self.kept(data)}
        if self.renewed:
            theirs[self.mark] = ours["mark"] = self.marked("", lease_id, stamp)
        if lease_ms is not None:
            ours |= {"lease_ms": lease_ms, "lease_s": -(-lease_ms // 1000)}
            theirs |= self.lasting(lease_ms)
        values: dict[str, Any] = {
            ":me": lease_id,
            ":seen": seen,
            ":no_newer": stamp.best_ms + OVERTAKEN_MS,
            ":new_lease_ms": lease_ms,
        }
        update = []
        for index, (name, value) in enumerate(ours.items()):
            update.append(f"#ours.#{name} = :ours{index}")
            values[f":ours{index}"] = value
        for index, expiry in enumerate(self.expiries(stamp)):
            # A process that is inside counts on less than the lease, and must not shorten it for the others.
            lease = f":lease{index}" if lease_ms is not None else expiry.lease
            values |= {f":base{index}": expiry.base, f":lease{index}": -(-(lease_ms or 0) // expiry.unit_ms)}
            update.append(f"#{expiry.attribute} = :base{index} + {lease}")
        return self._write(
            key,
            theirs,
            self._mine + order + condition,
            values,
            more=update,
            remove=[*([] if stamped else ["#ours.#renewed_at"]), *self.no_data(data)],
            process=process,
        )

    def _write(
        self,
        key: str,
        sets: Mapping[str, Any],
        condition: str,
        values: Mapping[str, Any],
        *,
        more: Sequence[str] = (),
        remove: Sequence[str] = (),
        process: str = "",
    ) -> Request:
        """An `UpdateItem`.

        :param sets: attributes of the item, by name.
        :param more: further assignments.
        :param remove: paths, or names of attributes.
        """
        assigned = [f"#{name} = :{name}" for name in sets] + list(more)
        gone = [path if path.startswith("#") else f"#{path}" for path in remove]
        update = (f"SET {', '.join(assigned)} " if assigned else "") + (
            f"REMOVE {', '.join(gone)}" if gone else ""
        )
        return self._request(
            "UpdateItem", key, update, condition, {**values, **{f":{n}": v for n, v in sets.items()}}, process
        )

    def _request(
        self,
        action: str,
        key: str,
        update: str,
        condition: str,
        values: Mapping[str, Any],
        process: str = "",
    ) -> Request:
        used = placeholders(f"{update} {condition}")
        named = {"#pk": self.partition_key, "#ours": OURS, "#process": process}
        sent = {alias: encode(value) for alias, value in values.items() if alias in used}
        return Request(
            action,
            {
                "TableName": self.table,
                "Key": self.item_key(key),
                **({"UpdateExpression": update, "ReturnValues": "ALL_NEW"} if update else {}),
                "ConditionExpression": condition,
                "ExpressionAttributeNames": {
                    alias: named.get(alias, alias[1:]) for alias in used if alias[0] == "#"
                },
                **({"ExpressionAttributeValues": sent} if sent else {}),
                "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
            },
        )
