"""The operations on a lock: acquire, renew, release, administer."""
