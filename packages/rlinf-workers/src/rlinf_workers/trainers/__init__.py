"""Training backends: how a model is trained on the ranks of a worker group."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
