"""How waiters notice a change: poller, stream, admission."""
