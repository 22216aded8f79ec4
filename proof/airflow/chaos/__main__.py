"""`python -m proof.airflow.chaos`: see the package."""

from __future__ import annotations

import sys

from demo.ctrl_c import leaving_on_ctrl_c

if __name__ == "__main__":
    with leaving_on_ctrl_c():
        from proof.airflow.chaos.play import main  # here, as in `demo/__main__.py`

        sys.exit(main())
