"""Cycles per second and their latency, straight at the engine, each worker in a process and on a key of its own.

Contestants take turns in short rounds, so that whatever else the machine does meets them all alike; before the first
one each has warmed up, and the engine with it. A ratio is that of two figures of the same round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import psutil

from bench.contestants import AWSFLOCK_COMMANDS, FLOOR, OURS, OURS_BEATING, RIVALS, Worker
from bench.measure.spread import percentile, spread
from deployments.engines import Engine

CONTESTANTS = (FLOOR, OURS, OURS_BEATING, *RIVALS)
#: How many workers → rounds, and seconds of each.
ROUNDS: Mapping[int, tuple[int, float]] = {1: (15, 2.0), 16: (9, 3.0)}
#: Cycles of each worker before the first round.
WARM = {1: 300, 16: 30}
COMMANDS = 10  # cycles of a command line, each two processes


def measure(engine: Engine) -> dict[str, Any]:
    """Of one worker and of sixteen; and of awsflock as the command that it is."""
    return {
        "workers": {str(workers): take_turns(engine, workers) for workers in ROUNDS},
        "commands": _commands(engine),
    }


def take_turns(engine: Engine, workers: int, endpoint_url: str | None = None) -> dict[str, Any]:
    """The rounds of all contestants.

    :param endpoint_url: where they find the engine, if not at its own address.
    """
    rounds, seconds = ROUNDS[workers]
    rates: dict[str, list[float]] = {who.name: [] for who in CONTESTANTS}
    times: dict[str, dict[str, list[float]]] = {
        who.name: {"acquires": [], "cycles": [], "cpu": [], "engine": []} for who in CONTESTANTS
    }
    with ExitStack() as stack:
        teams = {
            who.name: [
                stack.enter_context(who.worker(endpoint_url or engine.endpoint_url)) for _ in range(workers)
            ]
            for who in CONTESTANTS
        }
        for name, team in teams.items():
            for number, worker in enumerate(team):
                worker.do("prepare", key=_key(name, number))  # so that none is still starting when others run
        for name, team in teams.items():
            _together(team, name, count=WARM[workers])
        for number in range(rounds):
            for name in _turned(list(teams), number):
                team = teams[name]
                before, engine_before = _cpu(team), _cpu_of(engine.process.pid)
                results = _together(team, name, seconds=seconds)
                done = sum(len(each["cycles"]) for each in results)
                # Each worker's own rate, as they do not end at the same moment.
                rates[name].append(sum(len(each["cycles"]) / each["seconds"] for each in results))
                times[name]["cpu"].append((_cpu(team) - before) / done)
                times[name]["engine"].append((_cpu_of(engine.process.pid) - engine_before) / done)
                for each in results:
                    times[name]["acquires"] += each["acquires"]
                    times[name]["cycles"] += each["cycles"]
    return {
        name: {
            "cycles_per_second": spread(rates[name], 1),
            "of_the_floor": spread(_ratios(rates[name], rates[FLOOR.name])),
            "ours_to_it": spread(_ratios(rates[OURS.name], rates[name])),
            **{
                f"{what[:-1]}_ms": {
                    "p50": round(percentile(times[name][what], 0.5) * 1000, 2),
                    "p99": round(percentile(times[name][what], 0.99) * 1000, 2),
                }
                for what in ("acquires", "cycles")
            },
            "client_cpu_ms": spread([each * 1000 for each in times[name]["cpu"]]),
            "engine_cpu_ms": spread([each * 1000 for each in times[name]["engine"]]),
        }
        for name in rates
    }


def _commands(engine: Engine) -> dict[str, Any]:
    with AWSFLOCK_COMMANDS.worker(engine.endpoint_url) as worker:
        result = worker.do("cycles", key="commands", count=COMMANDS)
    return {"cycle_ms": spread([each * 1000 for each in result["cycles"]], 0)}


def _together(team: Sequence[Worker], name: str, **how: Any) -> list[dict[str, Any]]:
    for number, worker in enumerate(team):
        worker.tell("cycles", key=_key(name, number), **how)
    return [worker.hear() for worker in team]


def _key(name: str, number: int) -> str:
    return f"{name} {number}"


def _turned(names: list[str], number: int) -> list[str]:
    """Another one begins each round."""
    first = number % len(names)
    return names[first:] + names[:first]


def _ratios(values: Sequence[float], others: Sequence[float]) -> list[float]:
    return [value / other for value, other in zip(values, others, strict=True)]


def _cpu(team: Sequence[Worker]) -> float:
    return sum(_cpu_of(worker.process.pid) for worker in team)


def _cpu_of(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return float(times.user + times.system)
