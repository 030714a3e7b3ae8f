"""Why a plan is as it is: its critical path, its devices and memory, what would help, other modes, what-if answers.

`explain_problem` plans and explains a problem; `explain` explains a plan and its timeline. `explanation_text` tells it
on a terminal, `trace_json` draws it for Perfetto.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
