"""Plain Python values to DynamoDB's typed attribute values (``{"S": "text"}``) and back.

The SDK's own converter cannot be used here: the protocol imports no SDK.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from airflow_dynamo_lock.protocol.errors import LockValueError
from airflow_dynamo_lock.protocol.limits import checked_text

Attribute = Mapping[str, Any]

# What DynamoDB's numbers hold.
_DIGITS = 38
_MAGNITUDE = 125


def encode(value: Any) -> dict[str, Any]:
    """One value, typed. Knows None, bool, int, float, Decimal, str, bytes, lists and maps with text keys.

    :raises LockValueError: DynamoDB has no type for it.
    """
    match value:
        case None:
            return {"NULL": True}
        case bool():
            return {"BOOL": value}
        case int() | float() | Decimal():
            number = Decimal(str(value))
            if (
                not number.is_finite()
                or len(number.as_tuple().digits) > _DIGITS
                or abs(number.adjusted()) > _MAGNITUDE
            ):
                raise LockValueError(f"DynamoDB cannot store the number {value!r}.")
            return {"N": str(value)}
        case str():
            return {"S": checked_text("A text to be stored", value)}
        case bytes():
            return {"B": value}
        case list() | tuple():
            return {"L": [encode(each) for each in value]}
        case Mapping():
            return {"M": {checked_text("A map's key", name): encode(each) for name, each in value.items()}}
    raise LockValueError(f"DynamoDB cannot store a {type(value).__name__}: {value!r}.")


def decode(attribute: Attribute) -> Any:
    """The value of a typed attribute. Numbers become int where they are whole, else float.

    :raises ValueError: it is not a typed attribute.
    """
    if len(attribute) != 1:
        raise ValueError(f"not an attribute value: {attribute!r}")
    ((kind, value),) = attribute.items()
    match kind:
        case "NULL":
            return None
        case "BOOL" | "S" | "B" | "SS" | "BS":
            return value
        case "N":
            return _number(value)
        case "NS":
            return [_number(each) for each in value]
        case "L":
            return [decode(each) for each in value]
        case "M":
            return {name: decode(each) for name, each in value.items()}
    raise ValueError(f"unknown attribute type {kind!r}")


def _number(text: str) -> int | float:
    try:
        number = Decimal(text)
    except InvalidOperation:
        raise ValueError(f"not a number: {text!r}") from None
    return int(number) if number == number.to_integral_value() else float(number)
