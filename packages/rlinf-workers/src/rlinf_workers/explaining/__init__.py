"""Diagnosing a hang: which process waits for which, the root cause, and what it is doing.

snapshot.py records the state of a run, graph.py finds the root cause, processes.py and stacks.py inspect processes,
explanation.py combines the results and text.py displays them. Imports no torch, so the command answers within a second
on a busy machine.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
