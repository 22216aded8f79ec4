"""The Airflow layer: task group, operators, decorator, sensor, triggers, hook, and the guard of task processes."""
