"""Training backends: how a model is trained on the ranks of a worker group."""
