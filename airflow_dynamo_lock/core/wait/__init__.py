"""How waiters notice that a lock has become free: poller, stream, admission window."""
