from .explanation import (
    PlanExplanation as PlanExplanation,
    explain as explain,
)
from .make import explain_problem as explain_problem
from .memory import MemoryUse as MemoryUse
from .quantities import (
    counted as counted,
    gib as gib,
    seconds as seconds,
)
from .spans import (
    DeviceGroup as DeviceGroup,
    Spans as Spans,
    device_groups as device_groups,
    usage as usage,
)
from .text import explanation_text as explanation_text
from .trace import trace_json as trace_json
