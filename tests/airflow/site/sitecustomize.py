"""Run by every Python of the tests' Airflow as it starts: notes the triggerer's garbage collections.

Airflow holds a copy of the DAG for each trigger, so a full collection takes a triggerer with hundreds of them longer
than it lets pass without a warning of a blocked event loop. The tests must tell those pauses from any of our own.
"""

import gc
import json
import os
import sys
import time

_started = 0.0


def _note(phase: str, info: dict[str, int]) -> None:
    global _started
    if phase == "start":
        _started = time.time()
    elif info["generation"] == 2:
        line = json.dumps({"at": time.time(), "took": time.time() - _started}) + "\n"
        file = os.open(
            os.path.join(os.environ["DYNAMO_LOCK_TEST_ROOM"], "pauses.jsonl"),
            os.O_WRONLY | os.O_APPEND | os.O_CREAT,
        )
        os.write(file, line.encode())
        os.close(file)


if "triggerer" in sys.orig_argv:
    gc.callbacks.append(_note)
