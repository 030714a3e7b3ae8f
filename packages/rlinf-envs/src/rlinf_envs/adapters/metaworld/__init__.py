"""Meta-World: fifty tasks of one arm on MuJoCo, with scripted experts."""
