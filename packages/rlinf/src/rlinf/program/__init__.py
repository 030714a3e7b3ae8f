"""The training step of each job as a loop to read, in one process; docs/training-step.md walks through it."""
