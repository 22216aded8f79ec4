"""What a lock costs: ours beside three others from the package index, and beside the least that DynamoDB asks for.

``python -m bench`` measures and writes ``bench/results/latest.json`` and from it ``docs/performance.md``; ``--only``
chooses parts. The rooms:

- ``adapters/``: one script for each library, all driven by the same commands; each runs in an environment of its own.
- ``contestants``: who takes part, and the processes in which they run. ``environments``: what they are installed in.
- ``meter``: the proxy that counts requests and capacity units, whatever a library says of itself.
- ``measure/``: the parts, each of which returns plain data.
- ``page`` and ``plots``: that data as a page.

Nothing here has a deadline or a verdict on speed for a test to fail on: figures are compared within one run only.
"""
