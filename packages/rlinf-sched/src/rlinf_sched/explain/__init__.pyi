from .explanation import (
    GroupUse as GroupUse,
)
from .explanation import (
    ModeRow as ModeRow,
)
from .explanation import (
    PathPart as PathPart,
)
from .explanation import (
    PlanExplanation as PlanExplanation,
)
from .explanation import (
    explain as explain,
)
from .gains import (
    Gain as Gain,
)
from .gains import (
    gains_of as gains_of,
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
    KINDS as KINDS,
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
from .what_if import (
    WhatIf as WhatIf,
)
from .what_if import (
    what_if as what_if,
)
