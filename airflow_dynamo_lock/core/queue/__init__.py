"""The queue of waiters beside each lock."""
