"""A small actor-critic for states."""
