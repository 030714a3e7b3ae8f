"""The roles of embodied jobs: environment, rollout and actor."""
