"""Benchmarks: this package's lock, three other lock libraries, and the smallest possible pair of DynamoDB writes.

``python -m bench`` measures, writes the results to ``bench/results/latest.json``, and generates
``docs/performance.md`` from them. ``--only`` selects parts.

- ``adapters/``: one script for each library. All of them accept the same commands; each runs in the virtual
  environment of its library.
- ``contestants``: the libraries that are compared, and the worker processes that run their adapters.
- ``environments``: the virtual environments.
- ``meter``: a proxy that counts requests and computes capacity units.
- ``measure/``: one module for each part. Each returns plain data.
- ``page`` and ``plots``: generate the page and its figures.

No test fails because of a measured time. Compare times only within one run.
"""
