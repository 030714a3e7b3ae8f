"""ManiSkill 3, on CPUs and GPUs."""
