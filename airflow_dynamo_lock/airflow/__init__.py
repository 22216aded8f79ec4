"""The Airflow layer: group, operators, sensor, triggers, hook and the guard of tasks."""
