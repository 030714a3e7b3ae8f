from .algorithm_parts import AdvantagePart as AdvantagePart, PolicyLossPart as PolicyLossPart
from .compiled_code import keep_compiled_code_private as keep_compiled_code_private
from .control_characters import printable as printable, printable_lines as printable_lines
from .errors import (
    ClusterRefused as ClusterRefused,
    FlowDefinitionError as FlowDefinitionError,
    InterpreterRefused as InterpreterRefused,
    NodeLost as NodeLost,
    ProcessLost as ProcessLost,
    RemoteError as RemoteError,
    SettingsRefused as SettingsRefused,
    StepTimeout as StepTimeout,
    WeightFilesError as WeightFilesError,
    WorkerLost as WorkerLost,
    WorkersError as WorkersError,
)
from .execution.executor import Executor as Executor, FlowRun as FlowRun
from .execution.in_process import InProcessWorkers as InProcessWorkers
from .execution.ports import Reader as Reader, Writer as Writer
from .flow import Flow as Flow
from .gpu_memory import CONTEXT_BYTES as CONTEXT_BYTES
from .group import WorkerGroup as WorkerGroup
from .launchers.local.launcher import LocalLauncher as LocalLauncher
from .log_level import (
    LOG_LEVEL_VARIABLE as LOG_LEVEL_VARIABLE,
    LOG_LEVELS as LOG_LEVELS,
    set_up_logging as set_up_logging,
)
from .profiling import Measured as Measured, Profiler as Profiler, probe_plans as probe_plans
from .spans import COMPUTE_SPAN as COMPUTE_SPAN, SYNC_SPAN as SYNC_SPAN, Span as Span
from .worker import (
    Decision as Decision,
    Decisions as Decisions,
    Phase as Phase,
    StepContext as StepContext,
    Worker as Worker,
    record as record,
)

__version__: str
