from .algorithm_parts import (
    AdvantagePart as AdvantagePart,
)
from .algorithm_parts import (
    PolicyLossPart as PolicyLossPart,
)
from .compiled_code import keep_compiled_code_private as keep_compiled_code_private
from .control_characters import (
    printable as printable,
)
from .control_characters import (
    printable_lines as printable_lines,
)
from .engines.sampling import SamplingSettings as SamplingSettings
from .engines.spec import EngineSpec as EngineSpec
from .errors import (
    ClusterRefused as ClusterRefused,
)
from .errors import (
    FlowDefinitionError as FlowDefinitionError,
)
from .errors import (
    InterpreterRefused as InterpreterRefused,
)
from .errors import (
    NodeLost as NodeLost,
)
from .errors import (
    ProcessLost as ProcessLost,
)
from .errors import (
    RemoteError as RemoteError,
)
from .errors import (
    SettingsRefused as SettingsRefused,
)
from .errors import (
    StepTimeout as StepTimeout,
)
from .errors import (
    WeightFilesError as WeightFilesError,
)
from .errors import (
    WorkerLost as WorkerLost,
)
from .errors import (
    WorkersError as WorkersError,
)
from .execution.executor import (
    Executor as Executor,
)
from .execution.executor import (
    FlowRun as FlowRun,
)
from .execution.in_process import InProcessWorkers as InProcessWorkers
from .execution.ports import (
    Reader as Reader,
)
from .execution.ports import (
    Writer as Writer,
)
from .flow import Flow as Flow
from .group import WorkerGroup as WorkerGroup
from .launchers.local.launcher import LocalLauncher as LocalLauncher
from .log_level import (
    LOG_LEVEL_VARIABLE as LOG_LEVEL_VARIABLE,
)
from .log_level import (
    LOG_LEVELS as LOG_LEVELS,
)
from .log_level import (
    set_up_logging as set_up_logging,
)
from .profiling import (
    Measured as Measured,
)
from .profiling import (
    Profiler as Profiler,
)
from .profiling import (
    probe_plans as probe_plans,
)
from .spans import (
    COMPUTE_SPAN as COMPUTE_SPAN,
)
from .spans import (
    SYNC_SPAN as SYNC_SPAN,
)
from .spans import (
    Span as Span,
)
from .weight_sync.choose import suitable_weight_syncs as suitable_weight_syncs
from .weight_sync.spec import EdgeEnds as EdgeEnds
from .worker import (
    Phase as Phase,
)
from .worker import (
    StepContext as StepContext,
)
from .worker import (
    Worker as Worker,
)
from .worker import (
    record as record,
)

__version__: str
