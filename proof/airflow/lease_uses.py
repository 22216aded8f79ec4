"""The ledger of the guarded processes, and a check of it for violations of the lock.

Every 50 ms a guarded process appends a line to the ledger: the time, its identity, its lease and fencing
token, and for how many more seconds it may count on the lease (`dags/guarded.py`). The lines of one process
under one lease form a `LeaseUse`. `violations` checks the uses of one lock.

All lines count, also those of a process that has just learned that its lease is lost. Two exemptions apply,
as `docs/protocol.md` says under "What is not promised": from the break of a lease to its holder's next
heartbeat, exclusion is not promised; and a process that was paused may write one more line before it notices
the loss.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

#: Seconds within which a process must stop after its lease is lost: 2 s for `on_kill`, the rest for a busy
#: machine.
STOPPED_WITHIN = 4.0


@dataclass(frozen=True)
class LeaseUse:
    """The work of one process under one lease. Times are seconds since the epoch.

    :ivar first: time of its first line.
    :ivar last: time of its last line.
    :ivar last_valid: time of the last line in which the lease was still valid for it; -inf if there is none.
    """

    key: str
    lease_id: str
    token: int
    pid: int
    run_id: str
    first: float
    last: float
    last_valid: float
    deployment: str = ""
    dag_id: str = ""
    task_id: str = ""

    def __str__(self) -> str:
        text = (
            f"{self.deployment}/{self.dag_id}/{self.run_id}/{self.task_id}, pid {self.pid}, "
            f"lease {self.lease_id}, token {self.token}: {self.first:.2f} to {self.last:.2f}"
        )
        return text if self.last_valid == self.last else f"{text}, lease valid until {self.last_valid:.2f}"


class Ledger:
    """Reads the lease uses from a file to which processes still append."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._position = 0
        self._uses: dict[tuple[str, int, str], LeaseUse] = {}

    def uses(self, key: str | None = None) -> list[LeaseUse]:
        """Return the uses of all locks, or of one, in the order in which they began."""
        for line in self._new_lines():
            self._add(json.loads(line))
        uses = (use for use in self._uses.values() if key in (None, use.key))
        return sorted(uses, key=lambda use: use.first)

    def lines(self, use: LeaseUse) -> list[str]:
        """Return the lines of one use."""
        lines = self.path.read_text().splitlines()
        return [line for line in lines if use.lease_id in line and f'"pid": {use.pid},' in line]

    def _new_lines(self) -> list[bytes]:
        """Return the complete lines that were appended since the last call."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self._position)
            new, newline, _ = file.read().rpartition(b"\n")
        self._position += len(new) + len(newline)
        return new.splitlines()

    def _add(self, line: Mapping[str, Any]) -> None:
        at: float = line["at"]
        counts = line.get("remaining", 1.0) > 0
        name = line["key"], line["pid"], line["lease_id"]
        use = self._uses.get(name)
        if use is None:
            use = LeaseUse(
                key=line["key"],
                lease_id=line["lease_id"],
                token=line["token"],
                pid=line["pid"],
                run_id=line["run_id"],
                first=at,
                last=at,
                last_valid=float("-inf"),
                deployment=line.get("deployment", ""),
                dag_id=line.get("dag_id", ""),
                task_id=line.get("task_id", ""),
            )
        self._uses[name] = replace(use, last=at, last_valid=at if counts else use.last_valid)


@dataclass
class Exemptions:
    """Times in which exclusion is not promised. All are seconds since the epoch.

    :ivar broken: for each broken lease id, when it was broken, and when its processes must have noticed.
    :ivar resumed: for each pid, when the process was resumed after pauses.
    """

    broken: dict[str, tuple[float, float]] = field(default_factory=dict)
    resumed: dict[int, list[float]] = field(default_factory=lambda: defaultdict(list))

    def resumed_at(self, use: LeaseUse) -> float | None:
        """Return when the process was last resumed, if it could no longer count on its lease before that."""
        times = [at for at in self.resumed.get(use.pid, ()) if use.last_valid <= at <= use.last]
        return max(times, default=None)


@dataclass(frozen=True)
class Violation:
    """A violation, and the uses in which it was seen.

    :ivar rule: the promise that was violated: ``exclusion``, ``fencing token``, ``broken lease`` or ``lost
        lease``.
    """

    rule: str
    what: str
    uses: tuple[LeaseUse, ...]

    def __str__(self) -> str:
        return "\n".join([self.what, *(f"  {use}" for use in self.uses)])


def violations(uses: Sequence[LeaseUse], exemptions: Exemptions | None = None) -> Iterator[Violation]:
    """Yield the violations in the uses of one lock, which must be in the order in which they began."""
    exemptions = exemptions or Exemptions()
    inside: list[tuple[float, LeaseUse]] = []  # each with the time until which it excludes other leases
    highest: LeaseUse | None = None
    for use in uses:
        yield from _used_too_long(use, exemptions)
        end = exclusive_until(use, exemptions)
        if end < use.first:  # it never counted on its lease, and is exempt
            continue
        inside = [(until, other) for until, other in inside if until >= use.first]
        for _, other in inside:
            if other.lease_id != use.lease_id:
                yield Violation("exclusion", "two leases in use at the same time", (other, use))
        inside.append((end, use))
        if highest is not None and (
            use.token < highest.token or (use.token == highest.token and use.lease_id != highest.lease_id)
        ):
            yield Violation("fencing token", "a fencing token that did not increase", (highest, use))
        else:
            highest = use


def exclusive_until(use: LeaseUse, exemptions: Exemptions) -> float:
    """Return until when no process may use another lease of the lock, in seconds since the epoch."""
    if use.lease_id in exemptions.broken:
        return min(use.last, exemptions.broken[use.lease_id][0])
    return use.last if exemptions.resumed_at(use) is None else use.last_valid


def overtime(use: LeaseUse, exemptions: Exemptions) -> float:
    """Return for how many seconds the process worked after its lease was lost, without its pauses."""
    since = max(use.last_valid, use.first, exemptions.resumed_at(use) or 0.0)
    return use.last - since


def _used_too_long(use: LeaseUse, exemptions: Exemptions) -> Iterator[Violation]:
    """Yield violations of a process that counted on a broken lease, or used a lost one, for too long."""
    _, must_notice = exemptions.broken.get(use.lease_id, (0.0, float("inf")))
    if use.last_valid > must_notice:
        what = f"counted on its lease {use.last_valid - must_notice:.2f} s too long after a break"
        yield Violation("broken lease", what, (use,))
    seconds = overtime(use, exemptions)
    if seconds > STOPPED_WITHIN:
        yield Violation("lost lease", f"worked for {seconds:.2f} s after its lease was lost", (use,))
