"""``python -m matrix``: test the package in each release of Airflow, with that release's pinned packages.

For each release, the program creates or updates a virtual environment, and runs the tests of the Airflow layer, the
example DAGs, the demo, and the cases of `tests/airflow` in a real deployment. Two environments run at the same time,
because the tests spend most of their time waiting. The output is a table of cases and environments. The exit code is 1
if a test failed, and 2 if an environment could not be installed.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console

from deployments.ctrl_c import leaving_on_ctrl_c
from matrix.releases import ENVIRONMENTS, ROOT, SHORT, Environment, MatrixError, chosen
from matrix.table import Report, as_table, write_page

AT_ONCE = 2


def main() -> int:
    """Run the command line, and return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m matrix",
        description="Test the package in each release of Airflow, with that release's pinned packages.",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="AIRFLOW",
        help="release of Airflow, 'production' or 'lowest' (default: all)",
    )
    parser.add_argument(
        "--lock", action="store_true", help="resolve the pins of each release again, and run no tests"
    )
    parser.add_argument(
        "--page", action="store_true", help="write the last results of all environments into docs/versions.md"
    )
    parser.add_argument("-k", metavar="EXPRESSION", help="run only the tests that match, as in pytest")
    parser.add_argument(
        "--short",
        dest="k",
        action="store_const",
        const=SHORT,
        help="run only the cases that have differed between releases",
    )
    options = parser.parse_args()
    console = Console(highlight=False)
    try:
        environments = chosen(options.names)
        if options.lock:
            for environment in environments:
                environment.lock()
            return 0
        for environment in environments:
            console.print(
                f"{environment.name}: installing Airflow {environment.airflow} with its pinned packages"
            )
            environment.install()
    except MatrixError as error:
        print(error, file=sys.stderr)
        return 2
    with Running() as running:
        reports = list(running.reports(environments, options.k, console))
    console.print(as_table(reports))
    if options.page:
        write_page([Report(each) for each in ENVIRONMENTS])
    for report in reports:
        if not report.passed:
            print(report.failures)
            console.print(f"[bold red]{report.environment.name} failed[/]: {report.output}", soft_wrap=True)
    total = [sum(report.count(outcome) for report in reports) for outcome in ("passed", "failed", "skipped")]
    print("{} passed, {} failed, {} skipped".format(*total))
    return 0 if all(report.passed for report in reports) else 1


class Running:
    """Runs the tests of several environments. At the end of a ``with`` block, it stops the processes that still run."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                # On SIGINT, pytest stops the processes that the tests have started.
                os.killpg(process.pid, signal.SIGINT)
                process.wait()

    def reports(
        self, environments: Sequence[Environment], expression: str | None, console: Console
    ) -> Sequence[Report]:
        """Run the tests of each environment, `AT_ONCE` at a time, and return their reports in this order."""
        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            futures = [pool.submit(self._run, each, expression, console) for each in environments]
            return [each.result() for each in futures]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, environment: Environment, expression: str | None, console: Console) -> Report:
        report = Report(environment)
        report.path.unlink(missing_ok=True)
        console.print(f"{environment.name}: testing, with the output in {report.output}", soft_wrap=True)
        command = [str(environment.python), "-m", "pytest", "--numprocesses", "2", *environment.tests]
        command += ["--junitxml", str(report.path), "--basetemp", str(environment.folder / "tests")]
        command += ["-o", f"cache_dir={environment.folder / 'pytest'}"]
        if expression:
            command += ["-k", expression]  # overrides the one of the environment
        with report.output.open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                env={**os.environ, "DYNAMO_LOCK_MATRIX": environment.name},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            self._processes.append(process)
            process.wait()
        last = report.output.read_text(errors="replace").rstrip().rpartition("\n")[2]
        console.print(f"{environment.name}: {last}", markup=False)
        return report


if __name__ == "__main__":
    with leaving_on_ctrl_c():
        sys.exit(main())
