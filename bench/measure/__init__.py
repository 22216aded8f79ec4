"""The parts of the benchmarks. Each module has a function `measure`, which returns plain data for the results."""
