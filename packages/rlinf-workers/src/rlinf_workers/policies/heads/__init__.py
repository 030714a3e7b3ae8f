"""Action heads: distributions over actions from the output of a policy."""
