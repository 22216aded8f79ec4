"""An evaluator of the part of DynamoDB's update and condition expressions that the lock formats use.

It parses each expression once into closures, so that an evaluation takes microseconds.
`tests/simulator/test_dynamodb.py` sends the same requests to AWS's DynamoDB Local and compares the outcomes.

Items are immutable: a write returns a new item that shares all unchanged attributes with the old one. So a
refusal can show the present item, and a stale read an earlier one, without a copy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from typing import Any

Attribute = Mapping[str, Any]
Item = Mapping[str, Attribute]


class InvalidExpression(Exception):
    """DynamoDB would reject the request with a ValidationException, or this evaluator does not support it."""


@dataclass(frozen=True)
class Scope:
    """The input of an evaluation.

    :ivar item: the item before the write; empty if there is none.
    :ivar names: attribute names by placeholder (`#name`).
    :ivar values: values by placeholder (`:value`).
    """

    item: Item
    names: Mapping[str, str]
    values: Mapping[str, Attribute]


Operand = Callable[[Scope], Attribute | None]
Condition = Callable[[Scope], bool]
_TOKEN = re.compile(r"\s*(<>|<=|>=|[=<>(),+.-]|[#:]?\w+)")


@lru_cache(maxsize=1024)
def condition(text: str) -> Condition:
    """Parse a condition expression, or the key condition of a query.

    :raises InvalidExpression: the expression is invalid.
    """
    parser = _Parser(text)
    parsed = parser.disjunction()
    parser.expect("")
    return parsed


@lru_cache(maxsize=1024)
def update(text: str) -> Callable[[Scope], Item]:
    """Parse an update expression with the clauses ``SET`` and ``REMOVE``.

    The result computes the new item. It takes all operands from the item before the update, as DynamoDB does.

    :raises InvalidExpression: the expression is invalid.
    """
    parser = _Parser(text)
    sets: list[tuple[list[str], Operand]] = []
    removes: list[list[str]] = []
    while (clause := parser.next()) in ("SET", "REMOVE"):
        while True:
            path = parser.path(parser.next())
            if clause == "SET":
                parser.expect("=")
                sets.append((path, parser.value()))
            else:
                removes.append(path)
            if parser.peek != ",":
                break
            parser.next()
    if clause:
        raise InvalidExpression(f"unexpected {clause!r} in {text!r}")

    def apply(scope: Scope) -> Item:
        changes = [(path, _required(value(scope))) for path, value in sets]
        item = scope.item
        for path, value in changes:
            item = _with_attribute(item, [scope.names[name] for name in path], value)
        for path in removes:
            item = _with_attribute(item, [scope.names[name] for name in path], None)
        return item

    return apply


class _Parser:
    """A recursive-descent parser. Each method parses one rule of the grammar, from the next token on."""

    def __init__(self, text: str) -> None:
        self._tokens = _TOKEN.findall(text)[::-1]

    @property
    def peek(self) -> str:
        """The next token, which stays the next one; empty at the end."""
        return self._tokens[-1] if self._tokens else ""

    def next(self) -> str:
        """Remove the next token and return it; empty at the end."""
        return self._tokens.pop() if self._tokens else ""

    def expect(self, wanted: str) -> None:
        """Remove the next token, which must be `wanted`."""
        if (found := self.next()) != wanted:
            raise InvalidExpression(f"expected {wanted!r}, found {found!r}")

    # -- conditions, from the lowest to the highest precedence ------------------------------------------------

    def disjunction(self) -> Condition:
        """Conditions joined by ``OR``."""
        terms = [self.conjunction()]
        while self.peek == "OR":
            self.next()
            terms.append(self.conjunction())
        return terms[0] if len(terms) == 1 else lambda scope: any(term(scope) for term in terms)

    def conjunction(self) -> Condition:
        """Conditions joined by ``AND``."""
        factors = [self.negation()]
        while self.peek == "AND":
            self.next()
            factors.append(self.negation())
        return factors[0] if len(factors) == 1 else lambda scope: all(factor(scope) for factor in factors)

    def negation(self) -> Condition:
        """A condition, with or without ``NOT``."""
        if self.peek != "NOT":
            return self.simple()
        self.next()
        negated = self.negation()
        return lambda scope: not negated(scope)

    def simple(self) -> Condition:
        """A condition in parentheses, a function or a comparison."""
        match self.peek:
            case "(":
                self.next()
                inner = self.disjunction()
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
        left, comparator = self.operand(), self.next()
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
        """An operand, or a sum or difference of two."""
        left = self.operand()
        if self.peek not in ("+", "-"):
            return left
        sign, right = (1 if self.next() == "+" else -1), self.operand()
        return lambda scope: _sum(left(scope), sign, right(scope))

    def operand(self) -> Operand:
        """A value placeholder, a path, ``if_not_exists`` or ``size``."""
        token = self.peek
        if token == "if_not_exists":
            path, otherwise = self.arguments()

            def chosen(scope: Scope) -> Attribute | None:
                default = _required(otherwise(scope))  # DynamoDB requires it even if it is not used
                return default if (found := path(scope)) is None else found

            return chosen
        if token == "size":
            (path,) = self.arguments()
            return lambda scope: _size(path(scope))
        self.next()
        if token.startswith(":"):
            return lambda scope: scope.values[token]
        names = self.path(token)
        return lambda scope: _attribute(scope, names)

    def arguments(self) -> list[Operand]:
        """The arguments of a function, whose name is the next token."""
        self.next()
        return self.operands()

    def operands(self) -> list[Operand]:
        """Operands in parentheses."""
        self.expect("(")
        found = [self.operand()]
        while self.peek == ",":
            self.next()
            found.append(self.operand())
        self.expect(")")
        return found

    def path(self, first: str) -> list[str]:
        """The rest of a document path after its first name."""
        names = [first]
        while self.peek == ".":
            self.next()
            names.append(self.next())
        if not all(name.startswith("#") for name in names):
            raise InvalidExpression(f"a path must consist of name placeholders, not of {names}")
        return names


def _attribute(scope: Scope, path: list[str]) -> Attribute | None:
    """Return the attribute at a path, or None if there is none."""
    attributes: Any = scope.item
    found = None
    for name in path:
        found = attributes.get(scope.names[name])
        if found is None:
            return None
        attributes = found.get("M", {})
    return found


def _required(value: Attribute | None) -> Attribute:
    """Return an operand of an update, which must exist."""
    if value is None:
        raise InvalidExpression("The provided expression refers to an attribute that does not exist")
    return value


def _with_attribute(attributes: Item, path: list[str], value: Attribute | None) -> Item:
    """Return a copy of the attributes in which the one at a path is set, or removed if `value` is None."""
    name, *deeper = path
    if deeper:
        inner = attributes.get(name)
        if inner is None or "M" not in inner:
            raise InvalidExpression(
                "The document path provided in the update expression is invalid for update"
            )
        value = {"M": _with_attribute(inner["M"], deeper, value)}
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
    """Whether a string contains a substring, or a list or string set contains an element."""
    match attribute, part:
        case {"S": whole} | {"SS": whole}, {"S": text}:
            return text in whole
        case {"L": elements}, element:
            return any(_compare("=", each, element) for each in elements)
    return False


def _compare(comparator: str, left: Attribute | None, right: Attribute | None) -> bool:
    """Compare two attributes. If one is missing or their types differ, only ``<>`` is true."""
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
