from .cluster import (
    Cluster as Cluster,
    Device as Device,
    Links as Links,
)
from .describe import (
    flow_diagram as flow_diagram,
    index_ranges as index_ranges,
)
from .drift import (
    DriftDetector as DriftDetector,
    DriftMonitor as DriftMonitor,
)
from .errors import (
    ClusterError as ClusterError,
    FlowError as FlowError,
    InfeasibleError as InfeasibleError,
    PlanError as PlanError,
    ProblemError as ProblemError,
    ProfileError as ProfileError,
    SchedError as SchedError,
)
from .fit import (
    FittedTimes as FittedTimes,
    StageSample as StageSample,
    fit_stage as fit_stage,
)
from .flow_graph import (
    Dispatch as Dispatch,
    FlowGraph as FlowGraph,
    Stage as Stage,
    WeightEdge as WeightEdge,
)
from .modes import plan_for_mode as plan_for_mode
from .plan import (
    Mode as Mode,
    Plan as Plan,
    Prediction as Prediction,
    RunnerUp as RunnerUp,
    StagePlan as StagePlan,
    StagePrediction as StagePrediction,
)
from .planner import best_plan as best_plan
from .problem import Problem as Problem
from .problem_file import read_problem as read_problem
from .problem_schema import problem_json_schema as problem_json_schema
from .profile import (
    InstanceProfile as InstanceProfile,
    ItemCosts as ItemCosts,
    Profiles as Profiles,
    StageProfile as StageProfile,
    TimePoint as TimePoint,
)
from .simulator import (
    Timeline as Timeline,
    simulate as simulate,
)

__version__: str
