"""Airflow deployments and DynamoDB servers that the demo, the tests, the proof and the benchmarks start.

| module | what it contains |
|---|---|
| `deployment` | a complete Airflow deployment on this machine, with each component in a process of its own |
| `airflow_client` | a client of Airflow's REST API, for what a user does in the web interface |
| `ctrl_c` | a clean end of such programs on Ctrl-C |
| `processes` | finding and ending the processes of a deployment |
| `engines` | DynamoDB servers on 127.0.0.1: moto, and AWS's DynamoDB Local |
| `proxy` | an HTTP proxy in front of an engine that records, delays and drops requests |
| `limits` | DynamoDB's documented limits, for engines that do not enforce them |
| `kernels` | Jupyter kernels, each in a process of its own |
| `hold_times` | locks whose records say for how long leases are usually held |
| `clients` | both kinds of lock clients on an engine, with one interface |
| `patience` | how long a test waits for an event before it fails |
"""
