"""Cycles per second and their latency, without a proxy. Each worker is a process, with a key of its own.

The contestants take turns in short rounds, so that other load of the machine affects all of them. Before the first
round, each contestant warms up, and the engine with it. A ratio compares two figures of the same round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import psutil

from bench.contestants import AWSFLOCK_COMMANDS, FLOOR, OURS, OURS_WITH_HEARTBEATS, RIVALS, Worker
from bench.measure.spread import percentile, spread
from deployments.engines import Engine

CONTESTANTS = (FLOOR, OURS, OURS_WITH_HEARTBEATS, *RIVALS)
#: Number of workers → number of rounds, and seconds of each round.
ROUNDS: Mapping[int, tuple[int, float]] = {1: (15, 2.0), 16: (9, 3.0)}
#: Number of workers → cycles of each worker before the first round.
WARM = {1: 300, 16: 30}
COMMANDS = 10  # cycles of awsflock as a command line tool; each cycle is two processes


def measure(engine: Engine) -> dict[str, Any]:
    """Measure with one worker and with sixteen, and measure awsflock as a command line tool."""
    return {
        "workers": {str(workers): take_turns(engine, workers) for workers in ROUNDS},
        "commands": _commands(engine),
    }


@dataclass
class _Samples:
    """The samples of one contestant.

    :ivar rates: cycles per second, for each round.
    :ivar acquires: seconds of each acquire.
    :ivar cycles: seconds of each cycle.
    :ivar client_cpu: the workers' CPU seconds per cycle, for each round.
    :ivar engine_cpu: the engine's CPU seconds per cycle, for each round.
    """

    rates: list[float] = field(default_factory=list)
    acquires: list[float] = field(default_factory=list)
    cycles: list[float] = field(default_factory=list)
    client_cpu: list[float] = field(default_factory=list)
    engine_cpu: list[float] = field(default_factory=list)

    def summary(self, floor: _Samples, ours: _Samples) -> dict[str, Any]:
        """Return plain data. Ratios compare the same rounds of this contestant with those of the floor and of ours."""
        return {
            "cycles_per_second": spread(self.rates, 1),
            "of_the_floor": spread(_ratios(self.rates, floor.rates)),
            "ours_to_it": spread(_ratios(ours.rates, self.rates)),
            "acquire_ms": _percentiles_ms(self.acquires),
            "cycle_ms": _percentiles_ms(self.cycles),
            "client_cpu_ms": spread([each * 1000 for each in self.client_cpu]),
            "engine_cpu_ms": spread([each * 1000 for each in self.engine_cpu]),
        }


def take_turns(engine: Engine, workers: int, endpoint_url: str | None = None) -> dict[str, Any]:
    """Run the rounds of all contestants, and return the figures of each.

    :param workers: number of workers of each contestant.
    :param endpoint_url: address that the workers use for the engine, such as a proxy's; None for the engine's own.
    """
    rounds, seconds = ROUNDS[workers]
    url = endpoint_url or engine.endpoint_url
    samples = {contestant.name: _Samples() for contestant in CONTESTANTS}
    with ExitStack() as stack:
        teams = {
            contestant.name: [stack.enter_context(contestant.worker(url)) for _ in range(workers)]
            for contestant in CONTESTANTS
        }
        # All processes start before the first round.
        for name, team in teams.items():
            for number, worker in enumerate(team):
                worker.do("prepare", key=_key(name, number))
        for name, team in teams.items():
            _run_together(team, name, count=WARM[workers])
        for number in range(rounds):
            for name in _rotated(list(teams), number):
                _run_round(engine, teams[name], name, seconds, samples[name])
    return {name: each.summary(samples[FLOOR.name], samples[OURS.name]) for name, each in samples.items()}


def _run_round(engine: Engine, team: Sequence[Worker], name: str, seconds: float, samples: _Samples) -> None:
    """Run one round of one contestant, and add what it measures to `samples`."""
    client_before, engine_before = _cpu(team), _cpu_of(engine.process.pid)
    results = _run_together(team, name, seconds=seconds)
    count = sum(len(each["cycles"]) for each in results)
    # The sum of the workers' own rates, because they do not finish at the same moment.
    samples.rates.append(sum(len(each["cycles"]) / each["seconds"] for each in results))
    samples.client_cpu.append((_cpu(team) - client_before) / count)
    samples.engine_cpu.append((_cpu_of(engine.process.pid) - engine_before) / count)
    for each in results:
        samples.acquires += each["acquires"]
        samples.cycles += each["cycles"]


def _commands(engine: Engine) -> dict[str, Any]:
    """Measure awsflock with a process for each command."""
    with AWSFLOCK_COMMANDS.worker(engine.endpoint_url) as worker:
        result = worker.do("cycles", key="commands", count=COMMANDS)
    return {"cycle_ms": spread([each * 1000 for each in result["cycles"]], 0)}


def _run_together(team: Sequence[Worker], name: str, **limit: Any) -> list[dict[str, Any]]:
    """Let all workers run cycles at the same time. `limit` is ``seconds`` or ``count``. Returns their answers."""
    for number, worker in enumerate(team):
        worker.send("cycles", key=_key(name, number), **limit)
    return [worker.receive() for worker in team]


def _key(name: str, number: int) -> str:
    return f"{name} {number}"


def _rotated(names: list[str], number: int) -> list[str]:
    """Return the names so that another contestant is first in each round."""
    first = number % len(names)
    return names[first:] + names[:first]


def _ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    return [value / other for value, other in zip(values, others, strict=True)]


def _percentiles_ms(seconds: Sequence[float]) -> dict[str, float]:
    return {
        "p50": round(percentile(seconds, 0.5) * 1000, 2),
        "p99": round(percentile(seconds, 0.99) * 1000, 2),
    }


def _cpu(team: Sequence[Worker]) -> float:
    return sum(_cpu_of(worker.process.pid) for worker in team)


def _cpu_of(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
