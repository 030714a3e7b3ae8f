"""Makes plans from a config: by rule, by the planner, or by measurement."""
