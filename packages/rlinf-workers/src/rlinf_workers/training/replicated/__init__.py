"""The replicated backend: every rank holds the whole model, and gradients are summed over a fixed number of shards."""
