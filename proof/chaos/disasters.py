"""What goes wrong when: a plan drawn from one seed. The same seed gives the same plan; what it meets is real, and
differs a little each time.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

from deployments.proxy import Rule
from proof.chaos.settings import CAPACITIES, LEASE

#: What a network does → what it means for a request.
NETWORK = {
    "delayed requests": "each takes up to 3 s to the engine",
    "delayed answers": "each takes up to 3 s back",
    "cut": "the connection is closed, before the engine has the request",
    "cut after the write": "the connection is closed, after the engine has carried it out",
    "reset": "the connection is reset, before or after",
    "torn answers": "the connection is reset in the middle of the answer",
    "short answers": "the connection is closed in the middle of the answer",
    "black hole for requests": "they vanish",
    "black hole for answers": "they vanish, after the engine has carried the requests out",
    "stuck requests": "they reach the engine all together when it is over, given up by their senders",
    "throttling": "ThrottlingException",
}
#: What happens to processes and engines.
PROCESSES = ("SIGKILL", "SIGSTOP")
ENGINES = ("engine hangs", "engine restarts")

# Seconds between two, on average.
_PACE = 0.8
# How many of them are meant for somebody who holds a lock just then.
_AIMED = 0.5
#: The target that stands for such a one.
HOLDER = "holder of "


@dataclass(frozen=True)
class Disaster:
    """One of them.

    :ivar at: seconds after the start.
    :ivar kind: one of `NETWORK`, `PROCESSES`, `ENGINES`.
    :ivar target: a link or a process of the cast, or `HOLDER` and a key; empty for the engine and for all links.
    :ivar lasts: seconds; for a killed process, until it is replaced.
    :ivar share: of a link's requests that it meets.
    :ivar draw: a number from 0…1 for whatever else is to be chosen.
    """

    at: float
    kind: str
    target: str
    lasts: float
    share: float
    draw: float


def plan(
    rng: random.Random, duration: float, *, links: Sequence[str], places: Sequence[str], restarts: bool
) -> list[Disaster]:
    """What is to happen in so many seconds.

    :param restarts: the engine can be killed and started again, because it keeps its data. One that has all in memory
        (moto) can only be stopped and continued.
    """
    disasters = []
    network = list(NETWORK)
    engines = ENGINES if restarts else ENGINES[:1]
    at = rng.expovariate(1 / _PACE)
    while at < duration:
        sort = rng.choices(["network", "kill", "stop", "partition", "engine"], [46, 20, 18, 3, 3])[0]
        share = rng.choice([1.0, 1.0, 0.5])
        holder = HOLDER + rng.choice(list(CAPACITIES)) if rng.random() < _AIMED else None
        match sort:
            case "network":
                what, target = rng.choice(network), holder or rng.choice(links)
                lasts = rng.uniform(0.3, rng.choice([2.0, 4.0, 1.4 * LEASE]))
            case "partition":
                what, target, lasts = rng.choice(network), "", rng.uniform(0.3, 5.0)
            case "kill":
                what, target, lasts = "SIGKILL", holder or rng.choice(places), rng.uniform(0.1, 3.0)
            case "stop":
                what, target, lasts = "SIGSTOP", holder or rng.choice(places), rng.uniform(0.3, 1.6 * LEASE)
            case _:
                what, target, lasts = rng.choice(engines), "", rng.uniform(0.2, 4.0)
        disasters.append(Disaster(at, what, target, lasts, share, rng.random()))
        at += rng.expovariate(1 / _PACE)
    return disasters


def rule(disaster: Disaster) -> Rule:
    """What it does to the requests on a link."""
    lots = random.Random(disaster.draw)
    rule = Rule(lambda _: lots.random() < disaster.share)
    match disaster.kind:
        case "delayed requests":
            rule.delay = 0.1 + 2.9 * disaster.draw
        case "delayed answers":
            rule.lag = 0.1 + 2.9 * disaster.draw
        case "cut":
            rule.forward, rule.reply = False, lambda: None
        case "cut after the write":
            rule.reply = lambda: None
        case "reset":
            rule.forward, rule.reply, rule.resets = disaster.draw < 0.5, lambda: None, True
        case "torn answers" | "short answers":
            rule.tears, rule.resets = True, disaster.kind == "torn answers"
        case "black hole for requests":
            rule.forward, rule.reply = False, rule.hold
        case "black hole for answers":
            rule.reply = rule.hold
        case "stuck requests":
            rule.late, rule.reply = True, lambda: None
        case "throttling":
            rule.forward, rule.reply = False, lambda: (400, _THROTTLED)
        case _:
            raise ValueError(disaster.kind)
    return rule


_THROTTLED = b'{"__type": "com.amazon.coral.availability#ThrottlingException", "message": "Rate exceeded"}'
