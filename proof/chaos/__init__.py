"""Chaos: real processes use locks on real engines, while processes are killed and the network fails.

    python -m proof.chaos --minutes 10 --seed 7

A *disaster* is a fault that a run injects. A run ends with a time without disasters, in which every process
must still acquire its lock.

| module | content |
|---|---|
| `settings` | the roles of the processes, the locks, and the times |
| `actors` | the programs of the processes, and what they log |
| `log` | the log of one process |
| `forkserver` | starts, stops and kills the processes |
| `disasters` | the plan of disasters, chosen by a seed |
| `run` | one run: engine, proxies, processes and disasters |
| `groups` | starts the processes of a group, as Airflow does |
| `records` | the versions of the lock records, as the proxies see them |
| `evidence` | logs, disasters and records: which process counted on which lease, and until when |
| `checker` | finds violations in the evidence |
| `report` | computes the figures |
"""
