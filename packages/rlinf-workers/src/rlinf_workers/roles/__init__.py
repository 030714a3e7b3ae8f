"""Roles: the workers of the shipped jobs, and the records they exchange. A role knows the algorithm, but no specific
engine, backend, policy or environment."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
