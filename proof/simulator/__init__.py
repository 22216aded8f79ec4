"""Simulated histories: the real clients run in simulated time, while faults, chosen at random from one seed,
disturb them.

``python -m proof.simulator --seed 7`` plays one history and prints its log; `__main__` lists all commands.
"""
