"""The weight sync `per_node`: to each machine once, and there through shared memory."""
