"""The training loop that every job shares."""
