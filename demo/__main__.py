"""Run the demo, `demo/show.py`, with `python -m demo`."""

from __future__ import annotations

import sys

from deployments.ctrl_c import leaving_on_ctrl_c

if __name__ == "__main__":
    with leaving_on_ctrl_c():
        from demo.show import main  # imported late, because Ctrl-C must work during this slow import too

        sys.exit(main())
