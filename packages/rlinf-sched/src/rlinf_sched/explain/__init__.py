"""Explains a plan: its critical path, devices and memory, bottlenecks, the other modes, and what-if questions.

`explain_problem` plans and explains a problem; `explain` explains a plan and its timeline. `explanation_text` formats
the result for a terminal, `trace_json` for Perfetto.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
