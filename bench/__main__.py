"""``python -m bench``: measure, write down, and show. See the package's docstring."""

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
from demo.ctrl_c import leaving_on_ctrl_c

RESULTS = Path(__file__).parent / "results" / "latest.json"
MOTO, LOCAL = "moto", "dynamodb-local"
#: Parts → the engine that does each most justice; docs/performance.md says why.
PARTS = {
    "requests": MOTO,
    "speed": LOCAL,
    "distance": LOCAL,
    "handover": MOTO,
    "recovery": MOTO,
    "waiting": LOCAL,
    "airflow": MOTO,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS)
    )
    parser.add_argument(
        "--engine", choices=[MOTO, LOCAL], help="for all parts; each has one of its own by default"
    )
    parser.add_argument(
        "--results", type=Path, default=RESULTS, help="where the figures are kept (%(default)s)"
    )
    parser.add_argument("--page", action="store_true", help="measure nothing, only write the page anew")
    options = parser.parse_args()

    results: dict[str, Any] = json.loads(options.results.read_text()) if options.results.exists() else {}
    for part in [] if options.page else options.only:
        results[part] = _measured(part, options.engine or PARTS[part])
        options.results.parent.mkdir(exist_ok=True)
        options.results.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    if options.results == RESULTS:
        from bench.page import write

        write(results)
    return 0


def _measured(part: str, engine_name: str) -> dict[str, Any]:
    from bench.contestants import FLOOR, OURS, OURS_WITH_STREAMS, RIVALS, create_tables
    from deployments.engines import DynamoDBLocal, MotoServer

    print(f"{part}, on {engine_name} …", flush=True)
    began = time.monotonic()
    about: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "engine": engine_name,
        "client": _client(),
        "machine": _machine(),
    }
    module = importlib.import_module(f"bench.measure.{part}")
    if part == "airflow":  # it brings its own
        measured = module.measure()
    else:
        with {MOTO: MotoServer, LOCAL: DynamoDBLocal}[engine_name]() as engine:
            create_tables([FLOOR, OURS, OURS_WITH_STREAMS, *RIVALS], engine.endpoint_url)
            measured = module.measure(engine if part in ("speed", "distance") else engine.endpoint_url)
    about["took_seconds"] = round(time.monotonic() - began)
    print(f"{part}: {about['took_seconds']} s", flush=True)
    return {"about": about, **measured}


def _client() -> str:
    """The commit that last changed what is measured."""
    command = ["git", "log", "-1", "--format=%h", "--", "airflow_dynamo_lock"]
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def _machine() -> dict[str, Any]:
    return {
        "processors": os.cpu_count(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "load_before": round(os.getloadavg()[0], 1),  # what others were doing on it
    }


if __name__ == "__main__":
    with leaving_on_ctrl_c():
        try:
            sys.exit(main())
        except KeyboardInterrupt:
            print("\nInterrupted: everything that was started ends with this.", file=sys.stderr)
            os._exit(130)  # the pipes of what threads have started close now, and that ends them
