"""A soft actor that chooses the initial noise of a policy that denoises actions."""
