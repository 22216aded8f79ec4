"""The nouns of the lock, their limits and their checks."""
