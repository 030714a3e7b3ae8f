"""Roles: the workers of the shipped jobs, and the records that they exchange. A role knows the algorithm, but no
engine, backend, policy or environment by name."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
