"""Run by every Python of the tests' Airflow as it starts: notes in the triggerer what may block its event loop.

Airflow warns when it was blocked for 0.2 s. That happens without us: Airflow holds a copy of the DAG for each trigger,
so a full garbage collection takes a triggerer with hundreds of them as long; and on two busy cores it may simply have
to wait for its turn. The tests must tell that from work of our own. So this notes when a collection ran, and whether,
at each fiftieth of a second of work, that work was this package's.
"""

import gc
import json
import os
import signal
import sys
import time
from types import FrameType

STEP = 0.02
_started = 0.0
_ours: list[dict[str, float]] = []
# What the event loop is carrying out, and how many such there have been. Of many that each do a little, none blocks it.
_callback: FrameType | None = None
_callbacks = 0


def _write(name: str, *notes: dict[str, float]) -> None:
    file = os.open(
        os.path.join(os.environ["DYNAMO_LOCK_TEST_ROOM"], name), os.O_WRONLY | os.O_APPEND | os.O_CREAT
    )
    os.write(file, "".join(json.dumps(note) + "\n" for note in notes).encode())
    os.close(file)


def _note_collection(phase: str, info: dict[str, int]) -> None:
    global _started
    if phase == "start":
        _started = time.time()
    elif info["generation"] == 2:
        _write("pauses.jsonl", {"at": time.time(), "took": time.time() - _started})


def _note_work(_signal: int, frame: FrameType | None) -> None:
    global _callback, _callbacks
    ours = False
    while frame is not None and not _is_the_loops(frame):
        ours |= "airflow_dynamo_lock" in frame.f_code.co_filename
        frame = frame.f_back
    if frame is not _callback:
        _callback, _callbacks = frame, _callbacks + 1
    if ours:
        _ours.append({"at": time.time(), "took": STEP, "callback": _callbacks})
    if _ours and time.time() - _ours[0]["at"] > 1.0:
        _write("ours.jsonl", *_ours)
        _ours.clear()


def _is_the_loops(frame: FrameType) -> bool:
    """Whether the event loop carries out one callback in it, a step of a task for example."""
    return frame.f_code.co_name == "_run" and frame.f_code.co_filename.endswith("asyncio/events.py")


def _note_all_work() -> None:
    signal.signal(signal.SIGPROF, _note_work)
    signal.setitimer(signal.ITIMER_PROF, STEP, STEP)


if "triggerer" in sys.orig_argv:
    gc.callbacks.append(_note_collection)
    # The process that runs the triggers is forked from this one.
    os.register_at_fork(after_in_child=_note_all_work)
