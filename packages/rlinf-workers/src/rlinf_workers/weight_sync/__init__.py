"""What carries the weights of a policy version from the ranks that train to the ranks that serve."""
