from .harness import import_problem as import_problem
from .link import AgentTask as AgentTask
from .pictures import PICTURE_URL as PICTURE_URL, part_of as part_of, part_of_url as part_of_url
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
from .settings import (
    LOOP as LOOP,
    EpisodeSettings as EpisodeSettings,
    NamedAgent as NamedAgent,
    PictureSettings as PictureSettings,
)
from .templates import (
    ChatTemplate as ChatTemplate,
    TemplateRefused as TemplateRefused,
    template_of_folder as template_of_folder,
)
