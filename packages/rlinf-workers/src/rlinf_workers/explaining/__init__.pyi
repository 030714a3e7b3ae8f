from .explanation import (
    ProcessSight as ProcessSight,
    RunExplanation as RunExplanation,
    explain as explain,
)
from .processes import process_states as process_states
from .snapshot import (
    DRIVER as DRIVER,
    ProcessRecord as ProcessRecord,
    Snapshot as Snapshot,
    read_snapshot as read_snapshot,
    snapshot_json as snapshot_json,
)
from .text import (
    explanation_json as explanation_json,
    explanation_text as explanation_text,
    root_cause_line as root_cause_line,
)
