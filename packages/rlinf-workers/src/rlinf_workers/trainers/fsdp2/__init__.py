"""The backend whose ranks hold a model together: torch's `fully_shard`, one shard of every tensor a rank."""
