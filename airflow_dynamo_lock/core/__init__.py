"""The lock itself: what is asked of DynamoDB, and what the answers mean.

Nothing in this room does I/O, reads a clock or draws a random number. An operation is a generator that yields
*effects* (`effects.py`: a request to DynamoDB, a sleep, a wait for a change) and receives what came of them; it ends
by returning an outcome (`model.py`) or raising an error (`errors.py`). Whoever runs it brings the wire and the clock:
`airflow_dynamo_lock.client` runs it on boto3 and on aiobotocore, the tests on a simulated table.

Read in this order: `model`, `native` (the record and each conditional write), `staleness` (when is a holder dead),
`operations` (take, keep, give back), `watch` (many waiters, one poller), `table` (the DynamoDB table itself).
"""
