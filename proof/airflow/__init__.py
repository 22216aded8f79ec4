"""Real Airflow deployments with DAGs that record when they hold a lock, and what disturbs them (`chaos`)."""
