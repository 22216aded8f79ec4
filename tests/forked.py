"""Run Python programs that import the same large modules, each in a fork of one process that imports them once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from deployments.patience import PATIENCE

_PARENT = """
import json, os, sys, tempfile
{preload}
results = []
for program in json.load(sys.stdin):
    out, err = tempfile.TemporaryFile("w+"), tempfile.TemporaryFile("w+")
    pid = os.fork()
    if pid == 0:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        break
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    printed = []
    for file in out, err:
        file.seek(0)
        printed.append(file.read())
    results.append([code, *printed])
else:
    print("RESULTS", json.dumps(results))
    sys.exit()
exec(compile(program, "<program>", "exec"), {{"__name__": "__main__"}})
"""


def run_forked(
    programs: Sequence[str],
    preload: str,
    *,
    executable: str | Path = sys.executable,
    environment: Mapping[str, str] | None = None,
) -> list[subprocess.CompletedProcess[str]]:
    """Run the programs one after the other, each in a process of its own.

    :param preload: statements that import what all of them import.
    :param environment: environment variables; those of this process by default.
    """
    done = subprocess.run(
        [executable, "-P", "-c", _PARENT.format(preload=preload)],
        input=json.dumps(list(programs)),
        env=environment or os.environ,
        capture_output=True,
        text=True,
        timeout=PATIENCE * len(programs),
        check=False,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    results = json.loads(done.stdout.rpartition("RESULTS ")[2])
    return [
        subprocess.CompletedProcess(program, *result)
        for program, result in zip(programs, results, strict=True)
    ]
