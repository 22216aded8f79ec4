"""Records what may block the event loop of the tests' triggerer. Python runs this file whenever it starts.

Airflow logs a warning when the event loop was blocked for 0.2 s. This package need not be the cause. Airflow
keeps a copy of the DAG for each trigger, so a full garbage collection can take that long with hundreds of
triggers; and on two busy cores, the process may have to wait for a core. To tell the causes apart, this file
records each full collection, and samples the stack every 0.02 s of CPU time for code of this package.
`Testbed.blocked_warnings` reads the records.

It also names the component in the metrics of each process, for `proof.airflow.telemetry`.
"""

import gc
import json
import os
import signal
import sys
import time
from types import FrameType

SAMPLE_INTERVAL = 0.02  # seconds of CPU time
_collection_started = 0.0
# Samples with code of this package that are not written yet.
_samples: list[dict[str, float]] = []
# The callback that the event loop ran in the last sample, and its number: only long work in a single callback
# blocks the loop.
_callback: FrameType | None = None
_callback_number = 0


def _append(name: str, *lines: dict[str, float]) -> None:
    path = os.path.join(os.environ["DYNAMO_LOCK_TEST_FOLDER"], name)
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(file, "".join(json.dumps(line) + "\n" for line in lines).encode())
    os.close(file)


def _record_collection(phase: str, info: dict[str, int]) -> None:
    global _collection_started
    if phase == "start":
        _collection_started = time.time()
    elif info["generation"] == 2:
        _append("collections.jsonl", {"at": time.time(), "took": time.time() - _collection_started})


def _record_work(_signal: int, frame: FrameType | None) -> None:
    global _callback, _callback_number
    ours = False
    while frame is not None and not _runs_callback(frame):
        ours |= "airflow_dynamo_lock" in frame.f_code.co_filename
        frame = frame.f_back
    if frame is not _callback:
        _callback, _callback_number = frame, _callback_number + 1
    if ours:
        _samples.append({"at": time.time(), "took": SAMPLE_INTERVAL, "callback": _callback_number})
    if _samples and time.time() - _samples[0]["at"] > 1.0:
        _append("work.jsonl", *_samples)
        _samples.clear()


def _runs_callback(frame: FrameType) -> bool:
    """Return whether the event loop runs one callback in this frame, such as a step of an asyncio task."""
    return frame.f_code.co_name == "_run" and frame.f_code.co_filename.endswith("asyncio/events.py")


def _sample_work() -> None:
    signal.signal(signal.SIGPROF, _record_work)
    signal.setitimer(signal.ITIMER_PROF, SAMPLE_INTERVAL, SAMPLE_INTERVAL)


if "triggerer" in sys.orig_argv:
    gc.callbacks.append(_record_collection)
    # The triggerer forks the process that runs the triggers.
    os.register_at_fork(after_in_child=_sample_work)

for component in ("api-server", "scheduler", "triggerer", "worker"):
    if component in sys.orig_argv:
        # Airflow sends no metrics at all unless a test turns them on.
        os.environ["AIRFLOW__METRICS__STATSD_PREFIX"] = component
        os.environ["OTEL_SERVICE_NAME"] = component
