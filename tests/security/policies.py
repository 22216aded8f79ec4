"""Evaluation of IAM policies: whether they allow a call of the SDK, by its action, resource and leading keys.

moto enforces only actions: it treats every DynamoDB resource as ``*``, and ignores conditions on keys. `Guarded`
therefore checks each call before moto receives it, as IAM does for DynamoDB. It supports what the policies of this
project contain. Anything else is an error, so that no call is allowed or refused by accident.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from typing import Any

from botocore.exceptions import ClientError

from airflow_dynamo_lock.core.wait.stream import STREAM_ACTIONS

ACCOUNT = "arn:aws:dynamodb:eu-central-1:111122223333:table/"
_LEADING_KEYS = "dynamodb:LeadingKeys"
# The actions on which AWS evaluates the keys; in all others the condition key is missing.
_WITH_KEYS = {"GetItem", "BatchGetItem", "Query", "UpdateItem", "PutItem", "DeleteItem"}


def is_allowed(policy: Mapping[str, Any], action: str, params: Mapping[str, Any]) -> bool:
    """Return whether a policy allows a call: for each of its tables, a statement allows it and none denies it.

    A transaction is allowed if each of its parts is.
    """
    if action == "TransactWriteItems":
        return all(is_allowed(policy, *part) for part in _parts(params))
    for table, keys in _resources(action, params).items():
        effects = {
            statement["Effect"]
            for statement in policy["Statement"]
            if _matches(statement["Action"], f"dynamodb:{action}")
            and _matches(statement["Resource"], ACCOUNT + table)
            and _conditions_hold(statement.get("Condition", {}), keys)
        }
        if effects != {"Allow"}:
            return False
    return True


def _parts(params: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the actions of a transaction, each with its parameters."""
    return [(f"{kind}Item", part) for item in params["TransactItems"] for kind, part in item.items()]


def _resources(action: str, params: Mapping[str, Any]) -> dict[str, list[str] | None]:
    """Return the tables, or the stream, of a call, each with its partition keys; None if the call has no keys."""
    if action == "BatchGetItem":
        return {
            table: [key["key"]["S"] for key in wanted["Keys"]]
            for table, wanted in params["RequestItems"].items()
        }
    if action in STREAM_ACTIONS:
        arn = params.get("StreamArn") or params["ShardIterator"].partition("|")[0]
        return {arn.partition(":table/")[2]: None}
    if action not in _WITH_KEYS:
        return {params["TableName"]: None}
    match action:
        case "PutItem":
            key = params["Item"]["key"]
        case "Query":
            key = params["ExpressionAttributeValues"][":key"]
        case _:
            key = params["Key"]["key"]
    return {params["TableName"]: [key["S"]]}


def _matches(patterns: str | list[str], value: str) -> bool:
    listed = [patterns] if isinstance(patterns, str) else patterns
    return any(fnmatch.fnmatchcase(value, pattern) for pattern in listed)


def _conditions_hold(conditions: Mapping[str, Mapping[str, Any]], keys: list[str] | None) -> bool:
    for operator, wanted in conditions.items():
        if set(wanted) != {_LEADING_KEYS}:
            raise NotImplementedError(f"the condition keys {set(wanted)}")
        patterns = wanted[_LEADING_KEYS]
        match operator:
            case "ForAllValues:StringLike":
                # Also true without keys.
                holds = all(_matches(patterns, key) for key in keys or ())
            case "ForAllValues:StringEquals":
                holds = all(key in patterns for key in keys or ())
            case "Null":
                holds = (keys is None) == (patterns == "true")
            case _:
                raise NotImplementedError(f"the condition operator {operator}")
        if not holds:
            return False
    return True


class Guarded:
    """An SDK client with the permissions of a policy.

    :ivar used: the actions that were called.
    :ivar refused: the actions that the policy did not allow.
    """

    def __init__(self, client: Any, policy: Mapping[str, Any]) -> None:
        self._client = client
        self._policy = policy
        self.meta = client.meta
        self.used: set[str] = set()
        self.refused: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._client, name)
        if name == "close":
            return method
        action = self._client.meta.method_to_api_mapping[name]

        def call(**params: Any) -> Any:
            parts = _parts(params) if action == "TransactWriteItems" else [(action, params)]
            self.used |= {each for each, _ in parts}
            if not is_allowed(self._policy, action, params):
                self.refused.add(action)
                message = f"not authorized to perform: dynamodb:{action}"
                raise ClientError({"Error": {"Code": "AccessDeniedException", "Message": message}}, action)
            return method(**params)

        return call
