"""Why a plan is as it is: its critical path, its devices and memory, what would help, other modes, what-if answers.

`explain_problem` plans and explains a problem; `explain` explains a plan and its timeline. `explanation_text` tells it
on a terminal, `trace_json` draws it for Perfetto.
"""

from rlinf_sched.explain.explanation import GroupUse, ModeRow, PathPart, PlanExplanation, explain
from rlinf_sched.explain.gains import Gain, gains_of
from rlinf_sched.explain.make import explain_problem
from rlinf_sched.explain.memory import MemoryUse
from rlinf_sched.explain.spans import KINDS, DeviceGroup, Spans, device_groups, usage
from rlinf_sched.explain.text import explanation_text
from rlinf_sched.explain.trace import trace_json
from rlinf_sched.explain.what_if import WhatIf, what_if

__all__ = [
    "PlanExplanation",
    "PathPart",
    "ModeRow",
    "GroupUse",
    "MemoryUse",
    "WhatIf",
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
