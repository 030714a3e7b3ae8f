"""Why a plan is as it is: its critical path, its devices and memory, what would help, other modes, what-if answers.

`explain_problem` plans and explains a problem; `explain` explains a plan and its timeline. `explanation_text` tells it
on a terminal, `trace_json` draws it for Perfetto.
"""

from rlinf_sched.explain.explanation import Explanation, GroupUse, ModeRow, PathPart, explain
from rlinf_sched.explain.gains import Gain, gains_of
from rlinf_sched.explain.make import explain_problem
from rlinf_sched.explain.memory import MemoryUse
from rlinf_sched.explain.spans import KINDS, DeviceGroup, Spans, device_groups, usage
from rlinf_sched.explain.text import explanation_text
from rlinf_sched.explain.trace import trace_json
from rlinf_sched.explain.what_if import Answer, what_if

__all__ = [
    "Explanation",
    "PathPart",
    "ModeRow",
    "GroupUse",
    "MemoryUse",
    "Answer",
    "Gain",
    "Spans",
    "KINDS",
    "DeviceGroup",
    "device_groups",
    "usage",
    "explain_problem",
    "explain",
    "gains_of",
    "what_if",
    "explanation_text",
    "trace_json",
]
