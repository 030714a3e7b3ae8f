"""The engine on a transformers model: engine.py, with captured steps (graphs.py) or refilled rows (slots.py)."""
