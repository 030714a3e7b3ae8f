"""The training step of each job as a readable loop in one process; docs/training-step.md explains it."""
