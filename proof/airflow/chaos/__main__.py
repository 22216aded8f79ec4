"""Run ``python -m proof.airflow.chaos``."""

from __future__ import annotations

import sys

from deployments.ctrl_c import leaving_on_ctrl_c

if __name__ == "__main__":
    with leaving_on_ctrl_c():
        from proof.airflow.chaos.run import main  # imported late, as in `demo/__main__.py`

        sys.exit(main())
