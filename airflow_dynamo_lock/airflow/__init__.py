"""The Airflow layer: task group, operators, decorator, sensor, triggers, hook, guard."""
