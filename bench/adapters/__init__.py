"""The libraries that are measured, each behind the same two methods: see `bench.adapters.worker`."""
