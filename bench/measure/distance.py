"""Cycles per second once more, with a network between: each request takes 5 ms more on its way, as to a region nearby.

`bench.measure.speed` has the engine on the same machine, where most of a request is the engine's processor time. What a
request costs on AWS is mostly the way there and back.
"""

from __future__ import annotations

from typing import Any

from bench.measure.speed import take_turns
from deployments.engines import Engine
from deployments.proxy import Proxy, Rule

DELAY = 0.005  # seconds


def measure(engine: Engine) -> dict[str, Any]:
    """Of one worker, since sixteen would above all be slowed down by what delays them."""
    with Proxy(engine.endpoint_url) as proxy, proxy.applying(Rule(lambda _: True, delay=DELAY)):
        return {"delay_ms": DELAY * 1000, "workers": {"1": take_turns(engine, 1, proxy.endpoint_url)}}
