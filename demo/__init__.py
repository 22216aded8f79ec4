"""A demo (`python -m demo`): two Airflow deployments take turns on one lock."""
