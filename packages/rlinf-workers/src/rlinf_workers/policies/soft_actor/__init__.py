"""The actor of soft actor-critic, for states and pictures."""
