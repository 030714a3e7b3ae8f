from .embodied.actor import (
    ADAM_EPSILON as ADAM_EPSILON,
)
from .embodied.actor import (
    EmbodiedActor as EmbodiedActor,
)
from .embodied.actor import (
    EmbodiedActorSettings as EmbodiedActorSettings,
)
from .embodied.environment import (
    TRAIN_SEED_BIT as TRAIN_SEED_BIT,
)
from .embodied.environment import (
    Environment as Environment,
)
from .embodied.environment import (
    EnvironmentSettings as EnvironmentSettings,
)
from .embodied.evaluation import (
    EvaluationEnvironment as EvaluationEnvironment,
)
from .embodied.evaluation import (
    EvaluationPolicy as EvaluationPolicy,
)
from .embodied.interface import (
    EnvInterface as EnvInterface,
)
from .embodied.interface import (
    EnvProbe as EnvProbe,
)
from .embodied.interface import (
    interface_of as interface_of,
)
from .embodied.interface import (
    one_step as one_step,
)
from .embodied.rollout import EmbodiedRollout as EmbodiedRollout
from .language.actor import (
    Actor as Actor,
)
from .language.actor import (
    ActorSettings as ActorSettings,
)
from .language.logprob_mismatch import (
    LogprobMismatch as LogprobMismatch,
)
from .language.logprob_mismatch import (
    WorstToken as WorstToken,
)
from .language.logprob_mismatch import (
    mismatch_sums as mismatch_sums,
)
from .language.logprob_mismatch import (
    worst_token as worst_token,
)
from .language.probe import probe_refusal as probe_refusal
from .language.reference import Reference as Reference
from .language.reward import (
    Reward as Reward,
)
from .language.reward import (
    RewardSettings as RewardSettings,
)
from .language.rollout import (
    Rollout as Rollout,
)
from .language.rollout import (
    RolloutSettings as RolloutSettings,
)
from .records.embodied import (
    DemonstratedBatch as DemonstratedBatch,
)
from .records.embodied import (
    GroupEpisodes as GroupEpisodes,
)
from .records.embodied import (
    Trajectory as Trajectory,
)
from .records.embodied import (
    text_tensor as text_tensor,
)
from .records.language import (
    ComparedGroup as ComparedGroup,
)
from .records.language import (
    ExampleBatch as ExampleBatch,
)
from .records.language import (
    Prompt as Prompt,
)
from .records.language import (
    ScoredGroup as ScoredGroup,
)
