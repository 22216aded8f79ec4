"""Chaos in a real Airflow: runs compete for a few locks, while troubles affect processes, tasks and the
table.

    python -m proof.airflow.chaos --minutes 10 --seed 7

A *trouble* is a fault that a run injects. `state` is what the troubles read and change, `troubles` lists
them, `run` causes them and checks for violations, and `report` computes the figures.
"""
