"""Which leases the code that calls a client holds, as far as nested ``with`` blocks show it (R14, deadlocks end)."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from threading import get_ident

from airflow_dynamo_lock.client.leases import is_inherited, leases_of
from airflow_dynamo_lock.core.model.errors import LockValueError
from airflow_dynamo_lock.core.model.lease import Lease, LeaseSet
from airflow_dynamo_lock.core.model.text import shown

# The open blocks around the running code: client, thread and task of the block, lease.
_blocks: ContextVar[tuple[tuple[object, object, Lease | LeaseSet], ...]] = ContextVar("_blocks", default=())


@contextmanager
def block(client: object, lease: Lease | LeaseSet) -> Iterator[None]:
    """A ``with`` block that holds a lease of that client."""
    entry = client, _here(), lease
    _blocks.set((*_blocks.get(), entry))
    try:
        yield
    finally:
        # Not by a token: an asynchronous generator may be closed in another context.
        _blocks.set(tuple(each for each in _blocks.get() if each is not entry))


def held(client: object, further: Lease | LeaseSet | Sequence[Lease | LeaseSet]) -> list[Lease]:
    """The leases that the running code holds: those of the ``with`` blocks of this client around it, and `further`.

    A task or a thread that was started in a block does not count: the block may end without it.

    :raises LockValueError: `further` are no leases.
    """
    here, found = _here(), dict[tuple[str, str], Lease]()
    given = [further] if isinstance(further, (Lease, LeaseSet)) else further
    # Not any iterable: an iterator would be empty when the lock is acquired again.
    if not isinstance(given, Collection) or not all(isinstance(each, (Lease, LeaseSet)) for each in given):
        raise LockValueError(f"holding must be a lease or a list of leases, not {shown(further)}.")
    blocks = [lease for owner, where, lease in _blocks.get() if owner is client and where == here]
    for lease in (one for each in (*blocks, *given) for one in leases_of(each)):
        if not is_inherited(lease) and (lease.term is None or lease.remaining() > 0):
            found[lease.key, lease.lease_id] = lease
    return list(found.values())


def _here() -> tuple[int, object]:
    """The running thread, and its task if it has one."""
    try:
        return get_ident(), asyncio.current_task()
    except RuntimeError:  # no event loop
        return get_ident(), None
