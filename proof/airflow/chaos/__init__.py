"""Real Airflow in trouble: many runs want few locks, while processes, states and the lock table are being abused.

    python -m proof.airflow.chaos --minutes 10 --seed 7

`scene` is where it happens, `troubles` are what happens, `play` lets it happen, and `account` says what came of it.
"""
