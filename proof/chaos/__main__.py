"""Run disasters for some minutes, print the figures, and exit with 1 if there are violations."""

from __future__ import annotations

import argparse
import json
import secrets
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path

import tests.conftest  # noqa: F401 - removes this machine's AWS settings from the environment
from deployments.ctrl_c import leaving_on_ctrl_c
from deployments.engines import DynamoDBLocal, Engine, MotoServer
from proof.chaos.report import Report, as_json, as_text, report
from proof.chaos.run import ChaosRun
from proof.reports import add_report_option

ENGINES: dict[str, type[Engine]] = {engine.name: engine for engine in (MotoServer, DynamoDBLocal)}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m proof.chaos", description=__doc__)
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="duration of the disasters (default: %(default)g)"
    )
    parser.add_argument(
        "--seed",
        help="repeat the disasters of an earlier run; their effects may differ (default: a random seed)",
    )
    parser.add_argument(
        "--engine",
        choices=[*ENGINES, "both"],
        default="both",
        help="engine to run on (default: %(default)s, at the same time)",
    )
    add_report_option(parser)
    parser.add_argument("--logs", type=Path, metavar="FOLDER", help="write the evidence into FOLDER")
    parser.add_argument(
        "--careless",
        action="store_true",
        help="add a process that ignores the end of its lease; the checker must find it",
    )
    options = parser.parse_args()
    seed = options.seed or secrets.token_hex(4)
    engines = list(ENGINES.values()) if options.engine == "both" else [ENGINES[options.engine]]

    names = " and ".join(engine.name for engine in engines)
    print(f"seed {seed}: {options.minutes:g} minutes on {names}", flush=True)
    reports = run(engines, seed, options.minutes * 60, careless=options.careless, logs=options.logs)
    for each in reports:
        print(f"\n{as_text(each)}")
    if options.report:
        options.report.write_text(json.dumps(as_json(reports, seed), indent=2) + "\n")
    return int(any(each.violations for each in reports))


def run(
    engines: list[type[Engine]],
    seed: str,
    seconds: float,
    *,
    careless: bool = False,
    logs: Path | None = None,
) -> list[Report]:
    """Run on all engines at the same time, each with processes of its own.

    :param seed: chooses the disasters.
    :param seconds: duration of the disasters.
    :param careless: add a process that ignores the end of its lease.
    :param logs: folder for the evidence; None to keep none.
    """
    runs = [ChaosRun(engine, seed, careless=careless) for engine in engines]

    def one(chaos: ChaosRun) -> Report:
        with chaos:
            evidence = chaos.run(seconds)
        if logs is not None:
            evidence.save(logs / evidence.engine)
        return report(evidence)

    with ThreadPoolExecutor(len(runs)) as pool:
        try:
            results = [pool.submit(one, chaos) for chaos in runs]
            # Wake up regularly: Python runs signal handlers only in the main thread, and the operating system
            # may deliver a signal to another thread, which does not wake this one.
            while wait(results, timeout=0.5).not_done:
                pass
            return [result.result() for result in results]
        except BaseException:
            for chaos in runs:
                chaos.interrupt()
            raise


if __name__ == "__main__":
    with leaving_on_ctrl_c():
        sys.exit(main())
