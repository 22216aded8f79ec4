"""The parts of the bench. Each has a `measure`, which returns plain data for ``results/latest.json``."""
