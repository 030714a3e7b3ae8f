"""Episodes that show how a task is done, for supervised training before reinforcement learning."""
