"""What the demo, the tests, the proof and the benchmarks run against: Airflow deployments and DynamoDB servers.

| module | what it starts, or does |
|---|---|
| `deployment` | a complete Airflow deployment on this machine, each part a process of its own |
| `airflow_client` | what a user can do in Airflow's web interface, by its REST API |
| `processes` | process groups that end with the process that started them |
| `engines` | DynamoDB servers on 127.0.0.1: moto, and AWS's DynamoDB Local |
| `proxy` | a proxy before an engine that loses, delays and counts requests |
| `limits` | DynamoDB's documented limits, for engines that do not enforce them |
| `clients` | both kinds of lock clients on an engine, behind one interface |
| `patience` | how long a test waits for what must happen |
"""
