"""The backend whose ranks all hold the whole model and share the shards of a batch."""
