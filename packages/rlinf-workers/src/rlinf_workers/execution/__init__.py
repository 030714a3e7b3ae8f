"""Runs a planned flow: leases, ports that re-chunk, weight syncs, the executor."""
