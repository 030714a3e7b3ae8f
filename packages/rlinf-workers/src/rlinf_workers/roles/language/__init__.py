"""The roles of language jobs: rollout, reference, reward, actor and critic."""
