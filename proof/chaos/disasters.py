"""The disasters of a run: a plan of faults of the network, the processes and the engine, chosen by a seed.

The same seed gives the same plan. Its effects differ from run to run, because processes and times are real.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from deployments.proxy import Rule
from proof.chaos.settings import CAPACITIES, LEASE

#: Faults of a link, and what each does to a request.
NETWORK = {
    "delayed requests": "each takes up to 3 s to reach the engine",
    "delayed answers": "each takes up to 3 s to reach the process",
    "connection closed before the write": "before the engine has received the request",
    "connection closed after the write": "after the engine has processed the request",
    "connection reset": "before or after the engine has processed the request",
    "connection reset during the answer": "after half of the answer",
    "connection closed during the answer": "after half of the answer",
    "requests lost": "the engine does not receive them, and the process receives no answer",
    "answers lost": "the engine processes the requests, and the process receives no answer",
    "requests held back": "the engine receives them late, when their senders may have given up",
    "throttling": "the process receives a ThrottlingException",
}
#: Faults of processes and of the engine.
PROCESSES = ("SIGKILL", "SIGSTOP")
ENGINES = ("engine hangs", "engine restarts")
#: Prefix of a target, followed by a key: the process that holds this lock at that time, or its link.
HOLDER = "holder of "

# Mean number of seconds between two disasters.
_INTERVAL = 0.8
# Share of the disasters of processes and links whose target is a holder.
_HOLDER_SHARE = 0.5


@dataclass(frozen=True)
class Disaster:
    """One disaster of the plan.

    :ivar at: seconds from the start of the run.
    :ivar kind: one of `NETWORK`, `PROCESSES` and `ENGINES`.
    :ivar target: a link, a role, or `HOLDER` and a key. Empty for the engine, and for all links at the same
        time.
    :ivar seconds: duration; for a killed process the time until it is replaced.
    :ivar share: share of a link's requests that it affects.
    :ivar draw: random number from 0 to 1, for all other choices.
    """

    at: float
    kind: str
    target: str
    seconds: float
    share: float
    draw: float


def plan(
    rng: random.Random, duration: float, *, links: Sequence[str], roles: Sequence[str], restarts: bool
) -> list[Disaster]:
    """Choose the disasters of a run.

    :param duration: seconds from the start to the last disaster.
    :param links: links that disasters may affect.
    :param roles: roles whose processes disasters may affect.
    :param restarts: whether the engine may be killed and started again. moto keeps its data in memory, so it
        can only be stopped and resumed.
    """
    disasters = []
    network = list(NETWORK)
    engines = ENGINES if restarts else ENGINES[:1]
    at = rng.expovariate(1 / _INTERVAL)
    while at < duration:
        sort = rng.choices(["link", "kill", "stop", "all links", "engine"], [46, 20, 18, 3, 3])[0]
        share = rng.choice([1.0, 1.0, 0.5])
        holder = HOLDER + rng.choice(list(CAPACITIES)) if rng.random() < _HOLDER_SHARE else None
        match sort:
            case "link":
                kind, target = rng.choice(network), holder or rng.choice(links)
                seconds = rng.uniform(0.3, rng.choice([2.0, 4.0, 1.4 * LEASE]))
            case "all links":
                kind, target, seconds = rng.choice(network), "", rng.uniform(0.3, 5.0)
            case "kill":
                kind, target, seconds = "SIGKILL", holder or rng.choice(roles), rng.uniform(0.1, 3.0)
            case "stop":
                kind, target, seconds = "SIGSTOP", holder or rng.choice(roles), rng.uniform(0.3, 1.6 * LEASE)
            case _:
                kind, target, seconds = rng.choice(engines), "", rng.uniform(0.2, 4.0)
        disasters.append(Disaster(at, kind, target, seconds, share, rng.random()))
        at += rng.expovariate(1 / _INTERVAL)
    return disasters


def rule(disaster: Disaster) -> Rule:
    """Return the proxy's rule for a disaster of the network."""
    chance = random.Random(disaster.draw)
    rule = Rule(lambda _: chance.random() < disaster.share)
    match disaster.kind:
        case "delayed requests":
            rule.delay = 0.1 + 2.9 * disaster.draw
        case "delayed answers":
            rule.lag = 0.1 + 2.9 * disaster.draw
        case "connection closed before the write":
            rule.forward, rule.reply = False, lambda: None
        case "connection closed after the write":
            rule.reply = lambda: None
        case "connection reset":
            rule.forward, rule.reply, rule.resets = disaster.draw < 0.5, lambda: None, True
        case "connection reset during the answer":
            rule.tears, rule.resets = True, True
        case "connection closed during the answer":
            rule.tears = True
        case "requests lost":
            rule.forward, rule.reply = False, rule.hold
        case "answers lost":
            rule.reply = rule.hold
        case "requests held back":
            rule.late, rule.reply = True, lambda: None
        case "throttling":
            rule.forward, rule.reply = False, lambda: (400, _THROTTLED)
        case _:
            raise ValueError(f"No rule of the proxy is known for {disaster.kind!r}.")
    return rule


_THROTTLED = b'{"__type": "com.amazon.coral.availability#ThrottlingException", "message": "Rate exceeded"}'
