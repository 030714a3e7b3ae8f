from .explanation import (
    PlanExplanation as PlanExplanation,
)
from .explanation import (
    explain as explain,
)
from .make import explain_problem as explain_problem
from .memory import MemoryUse as MemoryUse
from .quantities import (
    counted as counted,
)
from .quantities import (
    gib as gib,
)
from .quantities import (
    seconds as seconds,
)
from .spans import (
    DeviceGroup as DeviceGroup,
)
from .spans import (
    Spans as Spans,
)
from .spans import (
    device_groups as device_groups,
)
from .spans import (
    usage as usage,
)
from .text import explanation_text as explanation_text
from .trace import trace_json as trace_json
