"""Entry point of ``python -m airflow_dynamo_lock.cli``, for use where ``dynamo-lock`` is not on the path."""

from airflow_dynamo_lock.cli.main import main

main()
