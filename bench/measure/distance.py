"""Cycles per second as in `bench.measure.speed`, but with a delay of 5 ms for each request, as to a nearby region.

Without the delay, most of a request's time is processor time of the engine, which runs on the same machine. On AWS,
most of it is the round trip over the network.
"""

from __future__ import annotations

from typing import Any

from bench.measure.speed import take_turns
from deployments.engines import Engine
from deployments.proxy import Proxy, Rule

DELAY = 0.005  # seconds


def measure(engine: Engine) -> dict[str, Any]:
    """Measure with one worker. With sixteen, the proxy that adds the delay would limit the rate."""
    with Proxy(engine.endpoint_url) as proxy, proxy.applying(Rule(lambda _: True, delay=DELAY)):
        return {"delay_ms": DELAY * 1000, "workers": {"1": take_turns(engine, 1, proxy.endpoint_url)}}
