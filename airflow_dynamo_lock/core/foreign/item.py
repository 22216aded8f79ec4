"""The item of a lock in a DynamoDB table of another library: what each format defines, how the item is read,
and the parts from which `core.foreign.dynamodb` builds its writes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from airflow_dynamo_lock.core.effects import Operation, Request, Stamp, T
from airflow_dynamo_lock.core.foreign.one_holder import OneHolder
from airflow_dynamo_lock.core.foreign.values import rounded_up
from airflow_dynamo_lock.core.model.arguments import checked_key
from airflow_dynamo_lock.core.model.errors import LockRecordError, LockValueError
from airflow_dynamo_lock.core.model.record import Holder, LockRecord
from airflow_dynamo_lock.core.table.codec import decode, encode
from airflow_dynamo_lock.core.table.expressions import placeholders
from airflow_dynamo_lock.core.table.items import read_holder
from airflow_dynamo_lock.core.table.reads import TableReads

#: Name of the attribute that this package adds to the item. Other libraries never write it.
OURS = "airflow_dynamo_lock"


@dataclass(frozen=True)
class Expiry:
    """An attribute with the end of a lease, or of an item: `base` plus the length of the lease.

    :ivar attribute: name of the attribute.
    :ivar base: end of a lease of length 0, epoch time in the unit of the attribute.
    :ivar unit_ms: unit of the attribute: 1 for milliseconds, 1000 for seconds.
    """

    attribute: str
    base: int
    unit_ms: int

    def value(self, lease_ms: int) -> int:
        """The value of the attribute for a lease of this length."""
        return self.base + rounded_up(lease_ms, self.unit_ms)

    @property
    def stored_lease(self) -> str:
        """Path in the item at which `OURS` stores the length of the lease, in the unit of the attribute."""
        return "#ours.#lease_ms" if self.unit_ms == 1 else "#ours.#lease_s"


class ItemLayout(ABC):
    """What a format defines: the attributes of the item of a lock.

    The *mark* of an item is the value of an attribute that other clients change when they acquire the lock.
    """

    default_partition_key: ClassVar[str]
    default_sort_key: ClassVar[str] = ""
    #: Sort key of a lock whose name does not contain ``::``.
    default_sort_value: ClassVar[str] = "-"
    ttl_attribute: ClassVar[str | None] = None
    #: Name of the attribute with the mark.
    mark_attribute: ClassVar[str]
    #: Whether a heartbeat changes the mark as well.
    heartbeat_changes_mark: ClassVar[bool] = True
    #: Condition that the lock is free, and the values of the condition.
    free_condition: ClassVar[tuple[str, Mapping[str, Any]]] = ("attribute_not_exists(#pk)", {})
    #: Attributes that only the item of a free lock has. A grant removes them.
    removed_on_grant: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def foreign_holder(self, values: Mapping[str, Any]) -> Holder | None:
        """The other library's holder; None if the lock is free. Not called while this package holds it.

        :param values: decoded attributes of the item, by name.
        :raises KeyError, TypeError, ValueError: an attribute is missing or damaged.
        """

    @abstractmethod
    def new_mark(self, owner: str, lease_id: str, stamp: Stamp) -> str:
        """The mark that a grant or a renewal of this package writes."""

    def owner_attributes(self, owner: str) -> Mapping[str, Any]:
        """The attributes that store the owner, in addition to the mark."""
        return {}

    def lease_attributes(self, lease_ms: int) -> Mapping[str, Any]:
        """The attributes that store the length of the lease."""
        return {}

    def expiries(self, stamp: Stamp) -> Sequence[Expiry]:
        """The attributes that store the end of the lease, or the end of the item's time to live."""
        return ()

    def unchanged_condition(self, holder: Holder) -> tuple[str, Mapping[str, Any]]:
        """Condition that a foreign holder has not changed since it was read, and the condition's values."""
        return f"#{self.mark_attribute} = :seen_mark", {":seen_mark": holder.version}

    def released_attributes(self, stamp: Stamp) -> Mapping[str, Any] | None:
        """The attributes that a release writes; None if a release deletes the item."""
        return None

    def data_attributes(self, data: Mapping[str, Any] | None) -> Mapping[str, Any]:
        """The attributes that store the lock's data; empty if the data are kept or removed."""
        return {}

    def removed_data(self, data: Mapping[str, Any] | None) -> list[str]:
        """The attributes to remove: an empty map removes the data, None keeps them."""
        return []

    def read_data(self, values: Mapping[str, Any]) -> Mapping[str, Any] | None:
        """The lock's data; None if there are none."""
        return None


@dataclass(frozen=True)
class ForeignItem(ItemLayout, TableReads, OneHolder):
    """Reads and writes the items of a DynamoDB table of another library.

    A holder of this package stores its lease in the attribute `OURS`, with a copy of the item's mark. The
    lease counts only while the mark in the item equals the copy.

    :ivar max_clock_skew_ms: if other clients compare the end of a lease with their host's clock, this package
        writes an end that is this much later, milliseconds.
    :ivar partition_key: name of the partition key; empty for the library's default.
    :ivar sort_key: name of the sort key; empty for the library's default, which may be no sort key. Without
        one, a lock's name is its partition key. With one, its name is ``partition key::sort key``, or the
        partition key alone if the sort key is `default_sort_value`.
    """

    table: str
    max_clock_skew_ms: int
    partition_key: str = ""
    sort_key: str = ""
    service: str = field(default="dynamodb", init=False)

    def __post_init__(self) -> None:
        if not self.partition_key:
            object.__setattr__(self, "partition_key", self.default_partition_key)
        if not self.sort_key:
            object.__setattr__(self, "sort_key", self.default_sort_key)

    @property
    def keys(self) -> Sequence[tuple[str, str, str]]:
        """Name, role and type of the partition key, and of the sort key if there is one."""
        sort = [(self.sort_key, "RANGE", "S")] if self.sort_key else []
        return [(self.partition_key, "HASH", "S"), *sort]

    def checked_key(self, key: str) -> str:
        """Return the name of a lock if each part of it can be a key in this table.

        :raises LockValueError: it cannot, or the same lock has a shorter name.
        """
        partition, _, sort = checked_key(key).partition("::")
        if self.sort_key and (not partition or sort == self.default_sort_value or key.endswith("::")):
            raise LockValueError(
                f"{key!r} cannot name a lock in the table {self.table!r}: use 'partition key::sort key', or "
                f"the partition key alone if the sort key is {self.default_sort_value!r}."
            )
        return key

    def carry_out(self, operation: Operation[T]) -> Operation[T]:
        """Run an operation as it is: all requests are DynamoDB's own."""
        return operation

    def item_key(self, key: str) -> Mapping[str, Any]:
        """The key of a lock's item: the name's two parts, or the whole name if there is no sort key."""
        if not self.sort_key:
            return {self.partition_key: encode(key)}
        partition, _, sort = key.partition("::")
        return {self.partition_key: encode(partition), self.sort_key: encode(sort or self.default_sort_value)}

    def name_of(self, item: Mapping[str, Any]) -> str:
        """The lock that an item, or the key of an item, belongs to; ``?`` if the partition key is missing."""
        partition = str(item.get(self.partition_key, {}).get("S", "?"))
        sort = str(item.get(self.sort_key, {}).get("S", self.default_sort_value))
        return partition if sort == self.default_sort_value else f"{partition}::{sort}"

    def record(self, item: Mapping[str, Any], server_ms: int | None) -> LockRecord:
        """The lock that an item shows, with one slot and without a token.

        :raises LockRecordError: the item is not a lock of this format, or no name refers to it.
        """
        name = self.name_of(item)
        try:
            values = {attribute: decode(value) for attribute, value in item.items()}
            holder = self._read_holder(values)
            if any(item[attribute] != value for attribute, value in self.item_key(name).items()):
                raise ValueError("no name refers to it, because its partition key contains '::'")
        except (TypeError, ValueError, KeyError, OverflowError, RecursionError) as wrong:
            why = f"its attribute {wrong} is missing" if isinstance(wrong, KeyError) else str(wrong)
            raise LockRecordError(
                f"The item of the lock {name!r} in table {self.table!r} is not a lock of the format "
                f"{self.name!r} ({why}); it was not changed: check the table's format, or check the item "
                "before you delete it."
            ) from wrong
        return LockRecord(
            name,
            capacity=1,
            available=0 if holder else 1,
            holders={holder.lease_id: holder} if holder else {},
            token=0,
            data=self.read_data(values),
            read_at_ms=server_ms,
        )

    def _read_holder(self, values: Mapping[str, Any]) -> Holder | None:
        ours, mark = values.get(OURS), values.get(self.mark_attribute)
        if isinstance(ours, dict) and mark and ours.get("mark") == mark:
            return read_holder(ours["lease_id"], ours)
        return self.foreign_holder(values)

    def _unchanged(self, holder: Holder) -> tuple[str, Mapping[str, Any]]:
        """Condition that a holder has not changed since it was read, and the values of the condition."""
        if not holder.ours:
            return self.unchanged_condition(holder)
        return f"#ours.#version = :seen AND {self._held_by_me}", {
            ":seen": holder.version,
            ":me": holder.lease_id,
        }

    @property
    def _held_by_me(self) -> str:
        """Condition that the lease with the id `:me` holds the lock."""
        return f"#ours.#lease_id = :me AND #{self.mark_attribute} = #ours.#mark"

    def _renewal(
        self,
        key: str,
        lease_id: str,
        stamp: Stamp,
        renewed_at_ms: int | None,
        seen: Holder | None,
        condition: str = "",
        *,
        sets: Mapping[str, Any] | None = None,
        only_seen: bool = False,
        lease_ms: int | None = None,
        data: Mapping[str, Any] | None = None,
        process: str = "",
    ) -> Request:
        """Give the lease a new version, and make further changes.

        A renewal that arrives late must not undo a newer one (`core.table.renewal_writes` explains this).

        :param renewed_at_ms: the time that it writes, epoch milliseconds; None removes it.
        :param seen: the holder as the sender last saw it; None if it has not.
        :param only_seen: the holder must not have changed since, not even by earlier heartbeats.
        :param condition: a further condition, which begins with ``AND``.
        :param sets: further values in `OURS`, by path.
        :param lease_ms: new length of the lease, milliseconds; None keeps it.
        :param data: new data; None keeps them, an empty map removes them.
        :param process: value of the placeholder ``#process``.
        """
        stamped = renewed_at_ms is not None
        in_order = ["#ours.#version = :seen"] if seen is not None else []
        if stamped and not only_seen:
            in_order.append("#ours.#renewed_at < :newer")
        ours = {
            "version": stamp.version,
            **({"renewed_at": renewed_at_ms} if stamped else {}),
            **(sets or {}),
        }
        theirs = dict(self.data_attributes(data))
        if self.heartbeat_changes_mark:
            theirs[self.mark_attribute] = ours["mark"] = self.new_mark("", lease_id, stamp)
        if lease_ms is not None:
            ours |= {"lease_ms": lease_ms, "lease_s": rounded_up(lease_ms)}
            theirs |= self.lease_attributes(lease_ms)
        values: dict[str, Any] = {
            ":me": lease_id,
            ":seen": seen.version if seen is not None else None,
            ":newer": renewed_at_ms,
            ":new_lease_ms": lease_ms,
        }
        assignments = []
        for index, (path, value) in enumerate(ours.items()):
            assignments.append(f"#ours.#{path} = :ours{index}")
            values[f":ours{index}"] = value
        for index, expiry in enumerate(self.expiries(stamp)):
            if lease_ms is not None:
                assignments.append(f"#{expiry.attribute} = :expiry{index}")
                values[f":expiry{index}"] = expiry.value(lease_ms)
            else:
                # DynamoDB adds the stored length. The sender's may be shorter: a process inside relies on the
                # grace only, and must not shorten the lease for the other processes.
                assignments.append(f"#{expiry.attribute} = :expiry{index} + {expiry.stored_lease}")
                values[f":expiry{index}"] = expiry.base
        return self._write(
            key,
            theirs,
            f"{self._held_by_me} AND ({' OR '.join(in_order)}){condition}",
            values,
            assignments=assignments,
            remove=[*([] if stamped else ["#ours.#renewed_at"]), *self.removed_data(data)],
            process=process,
        )

    def _write(
        self,
        key: str,
        sets: Mapping[str, Any],
        condition: str,
        values: Mapping[str, Any],
        *,
        assignments: Sequence[str] = (),
        remove: Sequence[str] = (),
        process: str = "",
    ) -> Request:
        """A conditional `UpdateItem`.

        :param sets: new values of attributes, by name.
        :param values: values of the condition and of `assignments`, by placeholder.
        :param assignments: further assignments.
        :param remove: paths (with ``#``) or names of attributes.
        """
        assigned = [*(f"#{name} = :{name}" for name in sets), *assignments]
        removed = [path if path.startswith("#") else f"#{path}" for path in remove]
        clauses = [f"SET {', '.join(assigned)}"] if assigned else []
        clauses += [f"REMOVE {', '.join(removed)}"] if removed else []
        values = {**values, **{f":{name}": value for name, value in sets.items()}}
        return self._request("UpdateItem", key, " ".join(clauses), condition, values, process)

    def _request(
        self,
        action: str,
        key: str,
        update: str,
        condition: str,
        values: Mapping[str, Any],
        process: str = "",
    ) -> Request:
        """A conditional write, without the values that its expressions do not use: DynamoDB refuses those.

        :param update: update expression; empty for a `DeleteItem`.
        """
        used = placeholders(f"{update} {condition}")
        names = {"#pk": self.partition_key, "#ours": OURS, "#process": process}
        sent = {alias: encode(value) for alias, value in values.items() if alias in used}
        return Request(
            action,
            {
                "TableName": self.table,
                "Key": self.item_key(key),
                **({"UpdateExpression": update, "ReturnValues": "ALL_NEW"} if update else {}),
                "ConditionExpression": condition,
                "ExpressionAttributeNames": {
                    alias: names.get(alias, alias[1:]) for alias in used if alias[0] == "#"
                },
                **({"ExpressionAttributeValues": sent} if sent else {}),
                "ReturnValuesOnConditionCheckFailure": "ALL_OLD",
            },
        )
