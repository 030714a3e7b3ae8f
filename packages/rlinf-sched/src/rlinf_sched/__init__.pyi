from .cluster import (
    Cluster as Cluster,
)
from .cluster import (
    Device as Device,
)
from .cluster import (
    Links as Links,
)
from .describe import (
    describe_plan as describe_plan,
)
from .describe import (
    flow_diagram as flow_diagram,
)
from .describe import (
    index_ranges as index_ranges,
)
from .drift import (
    DriftDetector as DriftDetector,
)
from .drift import (
    DriftMonitor as DriftMonitor,
)
from .errors import (
    ClusterError as ClusterError,
)
from .errors import (
    FlowError as FlowError,
)
from .errors import (
    InfeasibleError as InfeasibleError,
)
from .errors import (
    PlanError as PlanError,
)
from .errors import (
    ProblemError as ProblemError,
)
from .errors import (
    ProfileError as ProfileError,
)
from .errors import (
    SchedError as SchedError,
)
from .fit import (
    FittedTimes as FittedTimes,
)
from .fit import (
    StageSample as StageSample,
)
from .fit import (
    fit_stage as fit_stage,
)
from .flow_graph import (
    Dispatch as Dispatch,
)
from .flow_graph import (
    FlowGraph as FlowGraph,
)
from .flow_graph import (
    Stage as Stage,
)
from .flow_graph import (
    WeightEdge as WeightEdge,
)
from .modes import plan_for_mode as plan_for_mode
from .plan import (
    Mode as Mode,
)
from .plan import (
    Plan as Plan,
)
from .plan import (
    Prediction as Prediction,
)
from .plan import (
    RunnerUp as RunnerUp,
)
from .plan import (
    StagePlan as StagePlan,
)
from .plan import (
    StagePrediction as StagePrediction,
)
from .planner import best_plan as best_plan
from .problem import Problem as Problem
from .problem_file import read_problem as read_problem
from .problem_schema import problem_json_schema as problem_json_schema
from .profile import (
    InstanceProfile as InstanceProfile,
)
from .profile import (
    ItemCosts as ItemCosts,
)
from .profile import (
    Profiles as Profiles,
)
from .profile import (
    StageProfile as StageProfile,
)
from .profile import (
    TimePoint as TimePoint,
)
from .simulator import (
    Timeline as Timeline,
)
from .simulator import (
    simulate as simulate,
)

__version__: str
