"""The backend that shards one model over all ranks with torch's `fully_shard`."""
