from .adapters.gymnasium.env import vector_of_callable as vector_of_callable
from .core.disturbance import Disturbance as Disturbance
from .core.env_spec import EnvSpec as EnvSpec
from .core.factory import make_env as make_env
from .core.kind_spec import (
    KindSpec as KindSpec,
)
from .core.kind_spec import (
    MachineCheck as MachineCheck,
)
from .core.protocol import (
    PICTURE as PICTURE,
)
from .core.protocol import (
    ActionSpec as ActionSpec,
)
from .core.protocol import (
    BatchedEnv as BatchedEnv,
)
from .core.protocol import (
    EpisodeEnd as EpisodeEnd,
)
from .core.protocol import (
    FieldSpec as FieldSpec,
)
from .core.protocol import (
    Observation as Observation,
)
from .core.protocol import (
    Replayable as Replayable,
)
from .core.protocol import (
    RowSnapshot as RowSnapshot,
)
from .core.protocol import (
    StepResult as StepResult,
)
from .core.protocol import (
    observation_problem as observation_problem,
)
from .core.protocol import (
    tensor_field as tensor_field,
)
from .core.seeding import episode_seed as episode_seed
from .core.simulator_process import awaited_processes as awaited_processes
from .demonstrations.base import (
    Demonstration as Demonstration,
)
from .demonstrations.base import (
    DemonstrationFiles as DemonstrationFiles,
)
from .demonstrations.base import (
    RunEnvironment as RunEnvironment,
)
from .demonstrations.experts import record_expert as record_expert
from .demonstrations.files import open_demonstrations as open_demonstrations
from .demonstrations.sources import (
    EXPERTS as EXPERTS,
)
from .demonstrations.sources import (
    kinds_with as kinds_with,
)
from .demonstrations.sources import (
    sources as sources,
)
from .errors import (
    ConformanceError as ConformanceError,
)
from .errors import (
    EnvCrashedError as EnvCrashedError,
)
from .errors import (
    EnvError as EnvError,
)
from .errors import (
    RenderingUnavailableError as RenderingUnavailableError,
)
from .kinds import (
    KINDS as KINDS,
)
from .kinds import (
    kind_spec as kind_spec,
)
from .recording.films import (
    outcome_of as outcome_of,
)
from .recording.films import (
    write_grid as write_grid,
)
from .recording.recorder import (
    EpisodeRecorder as EpisodeRecorder,
)
from .recording.recorder import (
    RecordedEpisode as RecordedEpisode,
)
from .recording.recorder import (
    recorded_env as recorded_env,
)
from .recording.recorder import (
    with_drawing as with_drawing,
)
from .recording.video import require_video as require_video
from .venv import VenvSpec as VenvSpec

__version__: str
