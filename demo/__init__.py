"""Two Airflow deployments taking turns, to look at (`python -m demo`) and for the tests to build on."""
