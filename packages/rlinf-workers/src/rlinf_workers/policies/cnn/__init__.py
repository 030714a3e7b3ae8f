"""A small actor-critic for pictures."""
