"""From a plan to a running flow: leases, ports that re-chunk, weight syncs, the executor."""
