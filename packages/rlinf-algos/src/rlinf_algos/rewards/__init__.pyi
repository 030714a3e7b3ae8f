from .base import (
    OUTCOMES as OUTCOMES,
    PICTURE_FILES as PICTURE_FILES,
    BatchReward as BatchReward,
    Outcome as Outcome,
    RewardFunction as RewardFunction,
    RewardPart as RewardPart,
    RewardResult as RewardResult,
    close_reward as close_reward,
    judge_failure as judge_failure,
)
from .boxes import last_boxed as last_boxed
from .choice import MultipleChoice as MultipleChoice, multiple_choice as multiple_choice, stated_letter as stated_letter
from .code_tests import read_tests as read_tests
from .custom import CustomReward as CustomReward
from .exact import exact_match as exact_match
from .final_answer import final_answer as final_answer
from .length import LengthPenalty as LengthPenalty, LengthTarget as LengthTarget
from .mathematics import MathReward as MathReward, math_answer as math_answer
from .numeric import final_number as final_number, numeric_match as numeric_match
from .process_pool import awaited_processes as awaited_processes
from .program import MAX_TIMEOUTS as MAX_TIMEOUTS, CodeReward as CodeReward, code_tests as code_tests
from .python_session import (
    SESSION_LIMITS as SESSION_LIMITS,
    CellRun as CellRun,
    PythonSession as PythonSession,
)
from .registry import get_reward as get_reward, register_reward as register_reward, reward_names as reward_names
from .reward_model import RewardModel as RewardModel
from .sandbox import SandboxLimits as SandboxLimits, SandboxRun as SandboxRun, run_python as run_python
from .scoring import score as score, score_all as score_all
from .spec import RewardSpec as RewardSpec, RewardTerm as RewardTerm, make_reward as make_reward
from .tagged import think_answer_format as think_answer_format
from .timed import TimedRule as TimedRule
from .weighted import WeightedReward as WeightedReward
