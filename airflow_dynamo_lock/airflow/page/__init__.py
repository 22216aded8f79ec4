"""The Locks page in Airflow's web interface: its web service, and the script that the browser runs.

Airflow loads the plugin in each of its processes, and only the API server needs this folder: `plugin.py` loads it at
the first request.
"""
