from .explanation import (
    ProcessSight as ProcessSight,
)
from .explanation import (
    RunExplanation as RunExplanation,
)
from .explanation import (
    explain as explain,
)
from .processes import process_states as process_states
from .snapshot import (
    DRIVER as DRIVER,
)
from .snapshot import (
    ProcessRecord as ProcessRecord,
)
from .snapshot import (
    Snapshot as Snapshot,
)
from .snapshot import (
    read_snapshot as read_snapshot,
)
from .snapshot import (
    snapshot_json as snapshot_json,
)
from .text import (
    explanation_json as explanation_json,
)
from .text import (
    explanation_text as explanation_text,
)
from .text import (
    root_cause_line as root_cause_line,
)
