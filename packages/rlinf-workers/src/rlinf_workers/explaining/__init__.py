"""Why a run stands still: who waits for what, whose move it is, and what those are doing.

snapshot.py says what is known of a run at one moment, graph.py whose move it is, processes.py and stacks.py look at
processes, explanation.py puts it together and text.py shows it. Imports no torch: a command on a busy machine answers
within a second.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
