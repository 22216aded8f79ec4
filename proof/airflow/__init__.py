"""Real Airflow deployments for tests, whose guarded tasks record when they use a lease; and chaos runs."""
