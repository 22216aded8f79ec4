"""One adapter for each library. All implement the same interface, `bench.adapters.worker.Library`."""
