"""From a config to plans: by rule, by the planner, by measurement."""
