"""Generated from `client/_async` by `scripts/facades.py`."""
