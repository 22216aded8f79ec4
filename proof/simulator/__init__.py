"""Histories that nobody would think of: the real clients, in simulated time, against an adversary driven by one seed.

``python -m proof.simulator --seed 7`` plays one history and tells it; see `__main__` for many.
"""
