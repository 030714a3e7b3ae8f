from .embodied.actor import (
    EmbodiedActor as EmbodiedActor,
    EmbodiedActorSettings as EmbodiedActorSettings,
)
from .embodied.dagger_actor import (
    DaggerActor as DaggerActor,
    DaggerActorSettings as DaggerActorSettings,
)
from .embodied.dagger_rollout import DaggerRollout as DaggerRollout
from .embodied.dealing import EpisodeBatch as EpisodeBatch
from .embodied.environment import (
    TRAIN_SEED_BIT as TRAIN_SEED_BIT,
    Environment as Environment,
    EnvironmentSettings as EnvironmentSettings,
)
from .embodied.evaluation import (
    EvaluationEnvironment as EvaluationEnvironment,
    EvaluationPolicy as EvaluationPolicy,
    load_policy as load_policy,
)
from .embodied.expert_queries import ExpertQueries as ExpertQueries
from .embodied.imitating import ImitatingActor as ImitatingActor
from .embodied.interface import (
    EnvInterface as EnvInterface,
    EnvProbe as EnvProbe,
    interface_of as interface_of,
    one_step as one_step,
)
from .embodied.native_actions import native_actions as native_actions
from .embodied.off_policy_actor import (
    OffPolicyActor as OffPolicyActor,
    OffPolicyActorSettings as OffPolicyActorSettings,
)
from .embodied.off_policy_rollout import (
    OffPolicyRollout as OffPolicyRollout,
    OffPolicyRolloutSettings as OffPolicyRolloutSettings,
)
from .embodied.replay_buffer import (
    label_bytes as label_bytes,
    transition_bytes as transition_bytes,
)
from .embodied.rollout import EmbodiedRollout as EmbodiedRollout
from .language.actor import (
    Actor as Actor,
    ActorSettings as ActorSettings,
)
from .language.agent_rollout import AgentRollout as AgentRollout
from .language.conversation import conversation as conversation
from .language.late_groups import LateGroup as LateGroup, late_from_start as late_from_start
from .language.logprob_mismatch import (
    LogprobMismatch as LogprobMismatch,
    WorstToken as WorstToken,
    mismatch_sums as mismatch_sums,
    worst_token as worst_token,
)
from .language.model_judge import word_tokens as word_tokens
from .language.preferences import DpoSettings as DpoSettings
from .language.probe import probe_refusal as probe_refusal
from .language.reference import Reference as Reference
from .language.reward import (
    Reward as Reward,
    RewardSettings as RewardSettings,
)
from .language.rollout import (
    Rollout as Rollout,
    RolloutSettings as RolloutSettings,
)
from .language.session_router import SessionRouter as SessionRouter
from .language.supervised import (
    PreferenceTrainer as PreferenceTrainer,
    RewardModelTrainer as RewardModelTrainer,
    SupervisedSettings as SupervisedSettings,
    SupervisedTrainer as SupervisedTrainer,
)
from .picture_pool import PicturePool as PicturePool
from .records.embodied import (
    DemonstratedBatch as DemonstratedBatch,
    GroupEpisodes as GroupEpisodes,
    Trajectory as Trajectory,
    Transitions as Transitions,
    text_tensor as text_tensor,
    texts_of as texts_of,
)
from .records.language import (
    ComparedGroup as ComparedGroup,
    Example as Example,
    ExampleBatch as ExampleBatch,
    Measures as Measures,
    Preference as Preference,
    Prompt as Prompt,
    ScoredGroup as ScoredGroup,
)
from .records.pictures import Pictures as Pictures, ProcessedPicture as ProcessedPicture
