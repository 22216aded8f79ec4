"""A boto3 client of the simulated table without simulated time and without faults, for unit tests."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

from botocore import xform_name

from proof.simulator.dynamodb import Table
from proof.simulator.network import Network
from proof.simulator.world import Assumptions, World

_METHODS = {
    xform_name(action): action
    for action in (
        *("GetItem", "BatchGetItem", "Query"),
        *("UpdateItem", "PutItem", "DeleteItem", "TransactWriteItems"),
    )
}


class SimulatedClient:
    """A client whose requests are applied and answered at once. Reads are never stale.

    :param shows_refused: whether the answer to a refused write contains the item. DynamoDB returns it,
        DynamoDB Local does not.
    :ivar table: the only table. The table name of a request is ignored.
    """

    def __init__(self, *, shows_refused: bool = True) -> None:
        world = World(0, Assumptions(stale=0.0))
        self.table = Table()
        self._process = world.process("client")
        self._network = Network(
            world, self.table, lambda *_: None, dates=False, shows_refused=shows_refused, apart=0.0
        )
        self._tokens = map(str, count(1))

    def __getattr__(self, method: str) -> Callable[..., Any]:
        if method not in _METHODS:
            raise AttributeError(f"the simulated table does not support {method}")
        return partial(self._call, _METHODS[method])

    def _call(self, action: str, **params: Any) -> Any:
        if action == "TransactWriteItems":
            params = {"ClientRequestToken": next(self._tokens), **params}  # botocore adds one too
        answer = self._network.answer(self._process, action, params, 0.0)
        if isinstance(answer, Exception):
            raise answer
        return answer
