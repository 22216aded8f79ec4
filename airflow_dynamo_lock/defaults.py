"""Defaults of the Airflow layer and the command line. Imports nothing, so that both load quickly."""

#: Id of the Airflow connection that names the lock table.
DEFAULT_CONN_ID = "dynamo_lock_default"

#: Name of the lock table.
DEFAULT_TABLE = "airflow_locks"

#: Time for which a lease lasts after its last heartbeat, in seconds.
DEFAULT_LEASE = 120.0
