"""RLinf: reinforcement-learning post-training of language models and robot policies.

The commands of `rlinf` are here as functions. Importing this package imports nothing heavy; a name is imported when it
is first used.
"""

import lazy_loader

__version__ = "2026.11.0"

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
