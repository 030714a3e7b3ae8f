"""Action heads: what the output of a policy means."""
