"""``%load_ext airflow_dynamo_lock``: notebook cells that hold a lock while they run.

`magics` reads the line of a ``%%dynamo_lock`` cell, `cell` runs the rest of it, and `holder` is a process beside the
kernel that waits for the lock, sends heartbeats and releases, so that a crash of the kernel releases the lock.
"""
