"""``python -m bench``: run the benchmarks, store the results, and generate docs/performance.md from them."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import subprocess
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.environments import ROOT
from deployments.ctrl_c import leaving_on_ctrl_c
from proof.reports import output_file

RESULTS = Path(__file__).parent / "results" / "latest.json"
MOTO, LOCAL = "moto", "dynamodb-local"
#: Part → default engine. docs/performance.md ("How it is measured") gives the reasons.
PARTS = {
    "requests": MOTO,
    "speed": LOCAL,
    "distance": LOCAL,
    "handover": MOTO,
    "recovery": MOTO,
    "waiting": LOCAL,
    "airflow": MOTO,
    "locks_page": LOCAL,
    "notebooks": MOTO,
}


def main() -> int:
    """Run the command line, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m bench",
        description="Run the benchmarks, store the results, and generate docs/performance.md from them.",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        choices=PARTS,
        default=list(PARTS),
        metavar="PART",
        help=f"parts to measure, all by default: {', '.join(PARTS)}",
    )
    parser.add_argument(
        "--engine", choices=[MOTO, LOCAL], help="engine for all parts (default: one chosen for each part)"
    )
    parser.add_argument(
        "--results", type=output_file, default=RESULTS, help="file with the results (default: %(default)s)"
    )
    parser.add_argument(
        "--page", action="store_true", help="generate the page from the stored results, without measuring"
    )
    options = parser.parse_args()

    results: dict[str, Any] = json.loads(options.results.read_text()) if options.results.exists() else {}
    for part in [] if options.page else options.only:
        results[part] = _measure(part, options.engine or PARTS[part])
        options.results.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    if options.results == RESULTS:
        from bench.page import write

        write(results)
    return 0


def _measure(part: str, engine_name: str) -> dict[str, Any]:
    """Measure one part. Returns its data, with ``about``: when, where and with which commit it was measured."""
    from bench.contestants import FLOOR, OURS, OURS_WITH_STREAMS, RIVALS, create_tables
    from deployments.engines import DynamoDBLocal, MotoServer

    print(f"{part}, on {engine_name} …", flush=True)
    started = time.monotonic()
    about: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "engine": engine_name,
        "client": _client_commit(),
        "machine": _machine(),
    }
    module = importlib.import_module(f"bench.measure.{part}")
    if part in ("airflow", "locks_page"):  # they start an engine themselves
        data = module.measure()
    else:
        with {MOTO: MotoServer, LOCAL: DynamoDBLocal}[engine_name]() as engine:
            create_tables([FLOOR, OURS, OURS_WITH_STREAMS, *RIVALS], engine.endpoint_url)
            data = module.measure(engine if part in ("speed", "distance") else engine.endpoint_url)
    about["took_seconds"] = round(time.monotonic() - started)
    print(f"{part}: {about['took_seconds']} s", flush=True)
    return {"about": about, **data}


def _client_commit() -> str:
    """Return the abbreviated hash of the last commit that changed the package."""
    command = ["git", "log", "-1", "--format=%h", "--", "airflow_dynamo_lock"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _machine() -> dict[str, Any]:
    return {
        "processors": os.cpu_count(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 1),  # by other programs, before the measurement
    }


if __name__ == "__main__":
    with leaving_on_ctrl_c():
        try:
            sys.exit(main())
        except KeyboardInterrupt:
            print("\nInterrupted: all worker processes are being stopped.", file=sys.stderr)
            os._exit(
                130
            )  # closes the pipes to the workers of all threads; a worker exits when its pipe is closed
