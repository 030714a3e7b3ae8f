from .harness import import_problem as import_problem
from .link import AgentTask as AgentTask
from .records import (
    NOT_OF_POLICY as NOT_OF_POLICY,
    AgentTrajectory as AgentTrajectory,
    EpisodeEnded as EpisodeEnded,
    Sampled as Sampled,
    TokenNode as TokenNode,
)
from .server import ServerLimits as ServerLimits, SessionServer as SessionServer
from .sessions import (
    AgentSession as AgentSession,
    AssistantTurn as AssistantTurn,
    SessionLimits as SessionLimits,
    TokenSource as TokenSource,
)
from .settings import LOOP as LOOP, EpisodeSettings as EpisodeSettings, NamedAgent as NamedAgent
from .templates import (
    ChatTemplate as ChatTemplate,
    TemplateRefused as TemplateRefused,
    template_of_folder as template_of_folder,
)
