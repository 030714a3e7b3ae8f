from .base import (
    Failure as Failure,
    SupportsSnapshot as SupportsSnapshot,
    Tool as Tool,
    ToolFailed as ToolFailed,
    ToolResult as ToolResult,
    ToolSession as ToolSession,
    ToolSpec as ToolSpec,
    ToolUnavailable as ToolUnavailable,
)
from .checked import CheckedSession as CheckedSession, CheckedTool as CheckedTool
from .custom import FunctionTool as FunctionTool
from .environments import (
    ENVIRONMENTS as ENVIRONMENTS,
    CheckedEnvironment as CheckedEnvironment,
    TextEnvironment as TextEnvironment,
    TextStep as TextStep,
    check_environment as check_environment,
    make_environments as make_environments,
)
from .episode import EpisodeTools as EpisodeTools, start_tools as start_tools
from .python import PythonOptions as PythonOptions
from .registry import TOOLS as TOOLS, check_tools as check_tools, make_tools as make_tools
from .search import SearchOptions as SearchOptions, SearchTool as SearchTool
from .shell import ShellTool as ShellTool
