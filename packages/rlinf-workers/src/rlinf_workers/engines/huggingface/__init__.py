"""The engine on a transformers model: engine.py, with CUDA graphs (graphs.py) or continuous batching (slots.py)."""
