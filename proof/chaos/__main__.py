"""``python -m proof.chaos``: disasters for some minutes, and a table of what they did. See the package's docstring."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import tests.conftest  # noqa: F401 - nothing of this machine's AWS settings is to be used
from demo.ctrl_c import leaving_on_ctrl_c
from deployments.engines import DynamoDBLocal, Engine, MotoServer
from proof.chaos.arena import Arena
from proof.chaos.report import Report, as_json, as_text, report

ENGINES: dict[str, type[Engine]] = {engine.name: engine for engine in (MotoServer, DynamoDBLocal)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.chaos", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="of disasters (%(default)g)")
    parser.add_argument(
        "--seed", help="of a run that is to be done again; what is real differs a little each time"
    )
    parser.add_argument("--engine", choices=[*ENGINES, "both"], default="both", help="(%(default)s)")
    parser.add_argument("--report", type=Path, metavar="FILE", help="write the figures there, as JSON")
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="keep what the processes wrote there")
    parser.add_argument(
        "--careless",
        action="store_true",
        help="with a process that ignores the end of its lease: must be found",
    )
    options = parser.parse_args()
    seed = options.seed or secrets.token_hex(4)
    engines = list(ENGINES.values()) if options.engine == "both" else [ENGINES[options.engine]]

    print(
        f"seed {seed}: {options.minutes:g} minutes on {' and '.join(engine.name for engine in engines)}",
        flush=True,
    )
    reports = play(engines, seed, options.minutes * 60, careless=options.careless, logs=options.logs)
    for each in reports:
        print(f"\n{as_text(each)}")
    if options.report:
        options.report.write_text(json.dumps(as_json(reports, seed), indent=2) + "\n")
    return int(any(each.violations for each in reports))


def play(
    engines: list[type[Engine]],
    seed: str,
    seconds: float,
    *,
    careless: bool = False,
    logs: Path | None = None,
) -> list[Report]:
    """All engines at the same time, each with a cast of its own."""
    arenas = [Arena(engine, seed, careless=careless) for engine in engines]

    def one(arena: Arena) -> Report:
        with arena:
            evidence = arena.play(seconds)
        if logs is not None:
            evidence.keep(logs / evidence.engine)
        return report(evidence)

    with ThreadPoolExecutor(len(arenas)) as pool:
        try:
            playing = [pool.submit(one, arena) for arena in arenas]
            # With a timeout: Python handles a signal in this thread, but the system may wake another one for it.
            while wait(playing, timeout=0.5).not_done:
                pass
            return [each.result() for each in playing]
        except BaseException:
            for arena in arenas:
                arena.interrupt()
            raise


if __name__ == "__main__":
    with leaving_on_ctrl_c():
        sys.exit(main())
