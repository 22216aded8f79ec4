"""What counts where nobody says anything else. It loads nothing, so that the command line can ask as well."""

DEFAULT_CONN_ID = "dynamo_lock_default"
DEFAULT_TABLE = "airflow_locks"
DEFAULT_LEASE = 120.0
