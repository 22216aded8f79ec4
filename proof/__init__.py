"""The programs that try to break the lock. Each can also run for hours, or replay one case, outside the tests.

| package | what it does |
|---|---|
| `simulator` | plays the real clients in simulated time against a seeded adversary, and breaks rules on purpose |
| `chaos` | disturbs real processes on real engines: kills, pauses, lost answers |
| `airflow` | disturbs real Airflow deployments |
| `reports` | the options that name files for what these have measured |
| `figures` | writes what these have measured into docs/reliability.md |
"""
