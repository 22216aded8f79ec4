"""DynamoDB's update and condition expressions, as far as lock formats use them, evaluated fast.

Each expression is parsed once into closures; a history of a few dozen writes then costs microseconds for each. That it
decides as DynamoDB does is not taken on trust: `test_dynamodb.py` puts the same requests to AWS's own engine.

Items are never changed in place: a write returns a new one that shares what it did not touch. So a refusal can show the
old item, and a stale read an older one, without a copy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import cache
from typing import Any

Attribute = Mapping[str, Any]
Item = Mapping[str, Attribute]


class InvalidExpression(Exception):
    """DynamoDB would answer with a ValidationException."""


@dataclass(frozen=True)
class Scope:
    """What an expression is evaluated on."""

    item: Item
    names: Mapping[str, str]
    values: Mapping[str, Attribute]


Operand = Callable[[Scope], Attribute | None]
Condition = Callable[[Scope], bool]
_TOKEN = re.compile(r"\s*(<>|<=|>=|[=<>(),+.-]|[#:]?\w+)")


@cache
def condition(text: str) -> Condition:
    """A condition expression. The condition of a query on keys is one as well."""
    parser = _Parser(text)
    parsed = parser.either()
    parser.expect("")
    return parsed


@cache
def update(text: str) -> Callable[[Scope], Item]:
    """An update expression. Every value is taken from the item as it was before."""
    parser = _Parser(text)
    sets: list[tuple[list[str], Operand]] = []
    removes: list[list[str]] = []
    while (clause := parser.take()) in ("SET", "REMOVE"):
        while True:
            path = parser.path(parser.take())
            if clause == "SET":
                parser.expect("=")
                sets.append((path, parser.value()))
            else:
                removes.append(path)
            if parser.ahead != ",":
                break
            parser.take()
    if clause:
        raise InvalidExpression(f"unexpected {clause!r} in {text!r}")

    def apply(scope: Scope) -> Item:
        changes = [(path, _there(value(scope))) for path, value in sets]
        item = scope.item
        for path, value in changes:
            item = _replaced(item, [scope.names[name] for name in path], value)
        for path in removes:
            item = _replaced(item, [scope.names[name] for name in path], None)
        return item

    return apply


class _Parser:
    def __init__(self, text: str) -> None:
        self._tokens = _TOKEN.findall(text)[::-1]

    @property
    def ahead(self) -> str:
        return self._tokens[-1] if self._tokens else ""

    def take(self) -> str:
        return self._tokens.pop() if self._tokens else ""

    def expect(self, wanted: str) -> None:
        if (found := self.take()) != wanted:
            raise InvalidExpression(f"{wanted!r} expected, not {found!r}")

    # -- conditions, the weakest binding first ----------------------------------------------------------------

    def either(self) -> Condition:
        some = [self.both()]
        while self.ahead == "OR":
            self.take()
            some.append(self.both())
        return some[0] if len(some) == 1 else lambda scope: any(each(scope) for each in some)

    def both(self) -> Condition:
        every = [self.negated()]
        while self.ahead == "AND":
            self.take()
            every.append(self.negated())
        return every[0] if len(every) == 1 else lambda scope: all(each(scope) for each in every)

    def negated(self) -> Condition:
        if self.ahead != "NOT":
            return self.simple()
        self.take()
        denied = self.negated()
        return lambda scope: not denied(scope)

    def simple(self) -> Condition:
        match self.ahead:
            case "(":
                self.take()
                inner = self.either()
                self.expect(")")
                return inner
            case "attribute_exists" | "attribute_not_exists" as function:
                wanted = function == "attribute_exists"
                (path,) = self.arguments()
                return lambda scope: (path(scope) is not None) is wanted
            case "attribute_type":
                path, kind = self.arguments()
                return lambda scope: _type(path(scope)) == (kind(scope) or {}).get("S")
            case "begins_with":
                path, prefix = self.arguments()
                return lambda scope: _begins_with(path(scope), prefix(scope))
            case "contains":
                path, part = self.arguments()
                return lambda scope: _contains(path(scope), part(scope))
        left, comparator = self.operand(), self.take()
        match comparator:
            case "BETWEEN":
                low = self.operand()
                self.expect("AND")
                high = self.operand()
                return lambda scope: (
                    _compare(">=", left(scope), low(scope)) and _compare("<=", left(scope), high(scope))
                )
            case "IN":
                options = self.operands()
                return lambda scope: any(_compare("=", left(scope), each(scope)) for each in options)
        right = self.operand()
        return lambda scope: _compare(comparator, left(scope), right(scope))

    # -- values -----------------------------------------------------------------------------------------------

    def value(self) -> Operand:
        left = self.operand()
        if self.ahead not in ("+", "-"):
            return left
        sign, right = (1 if self.take() == "+" else -1), self.operand()
        return lambda scope: _sum(left(scope), sign, right(scope))

    def operand(self) -> Operand:
        token = self.ahead
        if token == "if_not_exists":
            path, otherwise = self.arguments()

            def chosen(scope: Scope) -> Attribute | None:
                default = _there(otherwise(scope))  # whether it is needed or not
                return default if (found := path(scope)) is None else found

            return chosen
        if token == "size":
            (path,) = self.arguments()
            return lambda scope: _size(path(scope))
        self.take()
        if token.startswith(":"):
            return lambda scope: scope.values[token]
        names = self.path(token)
        return lambda scope: _found(scope, names)

    def arguments(self) -> list[Operand]:
        self.take()
        return self.operands()

    def operands(self) -> list[Operand]:
        self.expect("(")
        found = [self.operand()]
        while self.ahead == ",":
            self.take()
            found.append(self.operand())
        self.expect(")")
        return found

    def path(self, first: str) -> list[str]:
        names = [first]
        while self.ahead == ".":
            self.take()
            names.append(self.take())
        if not all(name.startswith("#") for name in names):
            raise InvalidExpression(f"only placeholders are understood here, not {names}")
        return names


def _found(scope: Scope, path: list[str]) -> Attribute | None:
    attributes: Any = scope.item
    found = None
    for name in path:
        found = attributes.get(scope.names[name])
        if found is None:
            return None
        attributes = found.get("M", {})
    return found


def _there(value: Attribute | None) -> Attribute:
    """What an update takes a value from has to be there."""
    if value is None:
        raise InvalidExpression("The provided expression refers to an attribute that does not exist")
    return value


def _replaced(attributes: Item, path: list[str], value: Attribute | None) -> Item:
    """The attributes with one of them, however deep, set or (None) removed."""
    name, *deeper = path
    if deeper:
        inner = attributes.get(name)
        if inner is None or "M" not in inner:
            raise InvalidExpression(
                "The document path provided in the update expression is invalid for update"
            )
        value = {"M": _replaced(inner["M"], deeper, value)}
    if value is None:
        return {each: old for each, old in attributes.items() if each != name}
    return {**attributes, name: value}


def _type(attribute: Attribute | None) -> str | None:
    return None if attribute is None else next(iter(attribute))


def _size(attribute: Attribute | None) -> Attribute | None:
    match attribute:
        case {"M": held} | {"L": held} | {"S": held}:
            return {"N": str(len(held.encode() if isinstance(held, str) else held))}
    return None


def _sum(left: Attribute | None, sign: int, right: Attribute | None) -> Attribute | None:
    if left is None or right is None:
        return None
    if "N" not in left or "N" not in right:
        raise InvalidExpression("An operand in the update expression has an incorrect data type")
    return {"N": str(_number(left["N"]) + sign * _number(right["N"]))}


def _begins_with(attribute: Attribute | None, prefix: Attribute | None) -> bool:
    match attribute, prefix:
        case {"S": text}, {"S": start}:
            return bool(text.startswith(start))
    return False


def _contains(attribute: Attribute | None, part: Attribute | None) -> bool:
    """Whether a text has that in it, or a list or a set of texts has that member."""
    match attribute, part:
        case {"S": whole} | {"SS": whole}, {"S": text}:
            return text in whole
        case {"L": members}, member:
            return any(_compare("=", each, member) for each in members)
    return False


def _compare(comparator: str, left: Attribute | None, right: Attribute | None) -> bool:
    """A comparison with what is not there, or of two types, does not hold."""
    kind = _type(left)
    if left is None or right is None or kind != _type(right):
        return comparator == "<>"
    one, other = left[kind or ""], right[kind or ""]
    if kind == "N":
        one, other = _number(one), _number(other)
    match comparator:
        case "=":
            return bool(one == other)
        case "<>":
            return bool(one != other)
        case "<":
            return bool(one < other)
        case "<=":
            return bool(one <= other)
        case ">":
            return bool(one > other)
        case ">=":
            return bool(one >= other)
    raise InvalidExpression(f"unknown comparator {comparator!r}")


def _number(text: str) -> int | Decimal:
    try:
        return int(text)
    except ValueError:
        return Decimal(text)
