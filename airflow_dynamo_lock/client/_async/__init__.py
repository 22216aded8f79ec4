"""The source of the clients' methods. `scripts/facades.py` generates `client/_sync` from it."""
