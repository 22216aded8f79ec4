"""Python values to DynamoDB's typed attribute values (``{"S": "text"}``) and back.

The SDK's converter cannot be used here, because the core imports no SDK.
"""

from __future__ import annotations

from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from airflow_dynamo_lock.core.model.errors import LockValueError

Attribute = Mapping[str, Any]

# DynamoDB's limits for numbers: significant digits, and the exponent of the first one.
_DIGITS = 38
_TOO_LARGE = 10**_DIGITS
_SMALLEST, _LARGEST = -130, 125
# DynamoDB's limit for nested lists and maps.
_LEVELS = 31


def encode(value: Any, levels: int = _LEVELS) -> dict[str, Any]:
    """One value as a typed attribute: None, bool, int, float, Decimal, str, bytes, lists, and maps with text keys.

    Errors never show the value, which may be a secret (R12).

    :param levels: how deep lists and maps may be nested.
    :raises LockValueError: DynamoDB cannot store the value.
    """
    # The most frequent types come first, because each write encodes about fifteen values.
    match value:
        case str():
            return {"S": _text("text", value)}
        case bool():
            return {"BOOL": bool(value)}
        case int() | float() | Decimal():
            return {"N": _number_text(value)}
        case None:
            return {"NULL": True}
        case bytes():
            return {"B": value}
        case dict() | list() | tuple() | Mapping():
            if levels < 1:
                raise LockValueError(
                    f"The lock's data has more than {_LEVELS} levels of lists and maps, the most that DynamoDB "
                    "stores: store the deeper ones as JSON text."
                )
            if isinstance(value, (list, tuple)):
                return {"L": [encode(each, levels - 1) for each in value]}
            return {"M": {_name(name): encode(each, levels - 1) for name, each in value.items()}}
    raise LockValueError(
        f"The lock's data has a value of type {type(value).__name__}, which DynamoDB cannot store: "
        "use text, bytes, numbers, True, False, None, lists and maps."
    )


def decode(attribute: Attribute) -> Any:
    """The value of a typed attribute. Whole numbers become int, all others float.

    :raises ValueError: this is not a typed attribute.
    """
    if len(attribute) != 1:
        raise ValueError("not an attribute value")
    ((kind, value),) = attribute.items()
    match kind:
        case "S":
            return value
        case "N":
            return _number(value)
        case "NULL":
            return None
        case "BOOL" | "B" | "SS" | "BS":
            return value
        case "NS":
            return [_number(each) for each in value]
        case "L":
            return [decode(each) for each in value]
        case "M":
            return {name: decode(each) for name, each in value.items()}
    raise ValueError(f"unknown attribute type {kind!r}")


def _number_text(value: float | Decimal) -> str:
    if isinstance(value, int) and abs(value) < _TOO_LARGE:
        return str(int(value))
    number = Decimal(repr(float(value))) if isinstance(value, float) else Decimal(value)
    if number.is_finite():
        digits = "".join(map(str, number.as_tuple().digits)).strip("0")
        if not digits:
            return "0"
        if len(digits) <= _DIGITS and _SMALLEST <= number.adjusted() <= _LARGEST:
            return str(number)
    raise LockValueError(
        f"The lock's data has a number that DynamoDB cannot store, which takes {_DIGITS} digits, from 1E{_SMALLEST} to "
        f"9.9E{_LARGEST}: round it, or store it as text."
    )


def _text(name: str, text: str) -> str:
    try:
        text.encode()
    except UnicodeEncodeError:
        raise LockValueError(
            f"The lock's data or `about` has a {name} that is not valid Unicode: remove the lone surrogate from it."
        ) from None
    return text


def _name(name: Any) -> str:
    if not isinstance(name, str) or not name:
        raise LockValueError(
            "The lock's data or `about` has a key that is not text, or empty: use text that is not empty."
        )
    return _text("key", name)


def _number(text: str) -> int | float:
    if text.isdecimal() and text.isascii():
        return int(text)
    try:
        number = Decimal(text)
    except InvalidOperation:
        raise ValueError("not a number") from None
    if not number.is_finite():
        raise ValueError("not a finite number")
    return int(number) if number == number.to_integral_value() else float(number)
