"""`python -m demo`: two Airflow deployments take turns on one lock, to watch. What it does is in `demo/show.py`."""

from __future__ import annotations

import sys

from demo.ctrl_c import leaving_on_ctrl_c

if __name__ == "__main__":
    with leaving_on_ctrl_c():
        from demo.show import main  # here, because it takes a moment in which Ctrl-C is to work too

        sys.exit(main())
