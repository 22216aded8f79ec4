"""Real disasters: real processes of this package on real engines, killed at any moment, in a network that fails.

    python -m proof.chaos --minutes 10 --seed 7

| | |
|---|---|
| `settings` | the cast: who plays what on which lock, and the times |
| `actors` | what each process does, and writes into its log |
| `nursery` | starts, stops and kills them, and leaves none behind |
| `disasters` | what goes wrong when, from one seed |
| `arena` | engine, network and processes of one run, and what happens to them |
| `groups` | takes a group's processes through its runs, as Airflow does |
| `records` | what the lock records looked like, as seen on the wire |
| `evidence` | the logs, put together: who believed what, and until when |
| `checker` | what must never be, looked for in the evidence |
| `report` | the figures |
"""
