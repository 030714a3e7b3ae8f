"""The weight sync `per_node`: once to each machine, and there through shared memory."""
