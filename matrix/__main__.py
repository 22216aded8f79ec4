"""`python -m matrix`: test the package in each release of Airflow, under that release's own pins.

Each environment is made, or brought up to date, and then runs the tests of the Airflow layer, the example DAGs, the
demo, and a real deployment through the cases of `tests/airflow`. Two environments run side by side: most of it is
waiting. The output is a table of cases and environments. Exits with 1 if a test failed.
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

from demo.ctrl_c import leaving_on_ctrl_c
from matrix.releases import ENVIRONMENTS, ROOT, SHORT, Environment, MatrixError, chosen
from matrix.table import Report, as_table, write_page

AT_ONCE = 2


def main() -> int:
    """Do what the command line says; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m matrix", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="AIRFLOW", help="a release, 'production' or 'lowest'; all by default"
    )
    parser.add_argument(
        "--lock", action="store_true", help="write the pins of each release anew, and test nothing"
    )
    parser.add_argument(
        "--page", action="store_true", help="write the last result of every environment into docs/versions.md"
    )
    parser.add_argument("-k", metavar="EXPRESSION", help="only the tests that match, as in pytest")
    parser.add_argument(
        "--short",
        dest="k",
        action="store_const",
        const=SHORT,
        help="only the cases that have differed between releases",
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
            console.print(f"{environment.name}: installing Airflow {environment.airflow} under its own pins")
            environment.install()
    except MatrixError as wrong:
        print(wrong, file=sys.stderr)
        return 2
    with Running() as running:
        reports = list(running.reports(environments, options.k, console))
    console.print(as_table(reports))
    if options.page:
        write_page([Report(each) for each in ENVIRONMENTS])
    for report in reports:
        if not report.passed:
            console.print(f"[bold red]{report.environment.name} failed[/]: {report.output}", soft_wrap=True)
    total = [sum(report.count(outcome) for report in reports) for outcome in ("passed", "failed", "skipped")]
    print("{} passed, {} failed, {} skipped".format(*total))
    return 0 if all(report.passed for report in reports) else 1


class Running:
    """The test processes that run at the moment; those that are left at the end are ended."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes:
            if process.poll() is None:
                # The tests then stop what they have started.
                os.killpg(process.pid, signal.SIGINT)
                process.wait()

    def reports(
        self, environments: Sequence[Environment], expression: str | None, console: Console
    ) -> Sequence[Report]:
        """Run the tests in each environment."""
        pool = ThreadPoolExecutor(AT_ONCE)
        try:
            running = [pool.submit(self._run, each, expression, console) for each in environments]
            return [each.result() for each in running]
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def _run(self, environment: Environment, expression: str | None, console: Console) -> Report:
        report = Report(environment)
        report.path.unlink(missing_ok=True)
        console.print(f"{environment.name}: testing; the output goes to {report.output}", soft_wrap=True)
        command = [str(environment.python), "-m", "pytest", "--numprocesses", "2", *environment.tests]
        command += ["--junitxml", str(report.path), "--basetemp", str(environment.folder / "tests")]
        command += ["-o", f"cache_dir={environment.folder / 'pytest'}"]
        if expression:
            command += ["-k", expression]  # in the place of one that the environment has
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
