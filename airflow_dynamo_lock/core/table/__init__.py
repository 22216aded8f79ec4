"""The table: its format, and every request on it."""
