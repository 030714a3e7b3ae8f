"""The backend whose ranks each hold the whole model and divide the shards of a batch."""
