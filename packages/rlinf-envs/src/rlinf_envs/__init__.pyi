from .adapters.gymnasium.env import vector_of_callable as vector_of_callable
from .core.disturbance import Disturbance as Disturbance
from .core.env_spec import EnvSpec as EnvSpec
from .core.factory import make_env as make_env
from .core.kind_spec import (
    KindSpec as KindSpec,
    MachineCheck as MachineCheck,
)
from .core.protocol import (
    PICTURE as PICTURE,
    ActionSpec as ActionSpec,
    BatchedEnv as BatchedEnv,
    EpisodeEnd as EpisodeEnd,
    FieldSpec as FieldSpec,
    Observation as Observation,
    Replayable as Replayable,
    RowSnapshot as RowSnapshot,
    StepResult as StepResult,
    SupportsBegin as SupportsBegin,
    SupportsExpert as SupportsExpert,
    begins_rows as begins_rows,
    has_expert as has_expert,
    observation_problem as observation_problem,
    tensor_field as tensor_field,
)
from .core.seeding import episode_seed as episode_seed
from .core.simulator_process import awaited_processes as awaited_processes
from .core.success_classifier import SuccessClassifier as SuccessClassifier, Verdict as Verdict
from .core.vector import observes_rows as observes_rows
from .demonstrations.base import (
    Demonstration as Demonstration,
    DemonstrationFiles as DemonstrationFiles,
    RunEnvironment as RunEnvironment,
)
from .demonstrations.execution import ExecutedEpisode as ExecutedEpisode, execute_episode as execute_episode
from .demonstrations.experts import record_expert as record_expert
from .demonstrations.files import open_demonstrations as open_demonstrations
from .demonstrations.lerobot_writer import LeRobotWriter as LeRobotWriter
from .demonstrations.sources import (
    EXPERTS as EXPERTS,
    kinds_with as kinds_with,
    sources as sources,
)
from .errors import (
    ConformanceError as ConformanceError,
    EnvCrashedError as EnvCrashedError,
    EnvError as EnvError,
    RenderingUnavailableError as RenderingUnavailableError,
)
from .kinds import (
    KINDS as KINDS,
    kind_spec as kind_spec,
)
from .recording.films import (
    outcome_of as outcome_of,
    write_grid as write_grid,
)
from .recording.kept import (
    EpisodeKeeper as EpisodeKeeper,
    KeptEpisode as KeptEpisode,
    pack_episodes as pack_episodes,
    unpack_episodes as unpack_episodes,
)
from .recording.recorder import (
    EpisodeRecorder as EpisodeRecorder,
    RecordedEpisode as RecordedEpisode,
    recorded_env as recorded_env,
    with_drawing as with_drawing,
)
from .recording.replay import (
    ReplayedEpisode as ReplayedEpisode,
    continue_episode as continue_episode,
    demonstrate as demonstrate,
    open_replay as open_replay,
    replay_episode as replay_episode,
)
from .recording.video import require_video as require_video
from .remote import read_secret as read_secret
from .venv import VenvSpec as VenvSpec

__version__: str
