"""`python -m tests.airflow.chaos`: see the package. Here is only what Ctrl-C needs, as in `demo/__main__.py`."""

from __future__ import annotations

import signal
import sys

from demo.__main__ import SIGNALS, interrupt

if __name__ == "__main__":
    for number in SIGNALS:
        signal.signal(number, interrupt)
    try:
        from tests.airflow.chaos.play import main

        sys.exit(main())
    except KeyboardInterrupt:
        print("\nInterrupted: everything that was started has been stopped.", file=sys.stderr)
        sys.exit(130)
