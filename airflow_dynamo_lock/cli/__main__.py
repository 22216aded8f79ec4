"""``python -m airflow_dynamo_lock.cli``, where the command itself is not on the path."""

from airflow_dynamo_lock.cli.main import main

main()
