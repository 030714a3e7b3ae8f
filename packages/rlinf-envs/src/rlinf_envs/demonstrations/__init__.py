"""Demonstrations of tasks, for supervised training before reinforcement learning."""
