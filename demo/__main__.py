"""`python -m demo`: two Airflow deployments take turns on one lock, to watch.

Only what Ctrl-C needs is in this file: it works from the first moment on, and once it has begun, another one
changes nothing. What the demo does is in `demo/show.py`.
"""

from __future__ import annotations

import signal
import sys
from types import FrameType

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def interrupt(_signal: int, _frame: FrameType | None) -> None:
    """Leave, by way of every `with` block on the stack: each ends what it has started."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt


if __name__ == "__main__":
    for number in SIGNALS:
        signal.signal(number, interrupt)
    try:
        from demo.show import main  # here, because it takes a moment in which Ctrl-C is to work too

        sys.exit(main())
    except KeyboardInterrupt:
        print("\nInterrupted: everything that was started has been stopped.", file=sys.stderr)
        sys.exit(130)
