"""Converts the reward section of a config to the spec for the reward worker, and checks its requirements before a run
starts."""

from __future__ import annotations

import importlib.util
import traceback
from dataclasses import dataclass
from pathlib import Path

from rlinf.config.inputs import check_model_folder
from rlinf.config.rewards import (
    BySourceRewardConfig,
    ChoiceReward,
    CodeRewardConfig,
    FunctionReward,
    JudgeReward,
    LengthReward,
    LengthTargetReward,
    MathRewardConfig,
    ModelReward,
    RewardConfig,
    RuleReward,
    WeightedRewardConfig,
    members_of,
)
from rlinf.errors import UserError
from rlinf.tasks import TaskProblem
from rlinf_algos import RewardError
from rlinf_algos.rewards import (
    MAX_TIMEOUTS,
    PICTURE_FILES,
    RewardSpec,
    RewardTerm,
    close_reward,
    get_reward,
    make_reward,
    read_tests,
    run_python,
    score_all,
)

RULES = {
    "exact": "exact_match",
    "numeric": "numeric_match",
    "format": "think_answer_format",
    "episode": "rlinf.tasks.games:no_rule",
    "multiple_choice": "multiple_choice",
    "length": "length_penalty",
    "length_target": "length_target",
}
"""Kind in the config -> name in rlinf_algos."""
FUNCTIONS = {
    "math": "math_answer",
    "code": "code_tests",
    **{kind: RULES[kind] for kind in ("exact", "numeric", "format", "multiple_choice")},
}
"""Kind of `reward.kind` -> the function that `rlinf eval` calls for it."""
JUDGES = ("exact", "numeric", "random", "multiple_choice", "math", "code", "judge")
"""Kinds that judge whether an answer is right; `random` does so in evaluations."""


def reward_spec(config: RewardConfig, *, random_stands_for: str) -> RewardSpec:
    """The reward that a config describes; `random_stands_for` is the kind that a control run uses in evaluations."""
    match config:
        case RuleReward():
            return RewardSpec(rule=RULES[random_stands_for if config.kind == "random" else config.kind])
        case ChoiceReward() | LengthReward() | LengthTargetReward():
            return RewardSpec(rule=RULES[config.kind], options=config.model_dump(exclude={"kind"}))
        case FunctionReward():
            return RewardSpec(rule=config.path, time_limit_s=config.time_limit_s)
        case WeightedRewardConfig():
            terms = (
                RewardTerm(
                    name=name,
                    weight=term.weight,
                    reward=reward_spec(term.reward, random_stands_for=random_stands_for),
                )
                for name, term in config.terms.items()
            )
            return RewardSpec(rule="weighted", terms=tuple(terms))
        case BySourceRewardConfig():
            sources = (
                RewardTerm(name=name, weight=1.0, reward=reward_spec(reward, random_stands_for=random_stands_for))
                for name, reward in config.sources.items()
            )
            return RewardSpec(rule="by_source", options={"column": config.column}, terms=tuple(sources))
        case MathRewardConfig():
            options = {
                "num_processes": config.num_processes,
                "time_limit_s": config.time_limit_s,
                "wall_limit_s": config.wall_limit_s,
                "memory_limit_bytes": config.memory_limit_mib << 20,
            }
            return RewardSpec(rule="math_answer", options=options)
        case CodeRewardConfig():
            options = {
                "num_processes": config.num_processes,
                "partial": config.partial,
                "allow_weak_isolation": config.allow_weak_isolation,
                "wall_s": config.wall_limit_s,
                "cpu_s": config.cpu_limit_s,
                "memory_bytes": config.memory_limit_mib << 20,
            }
            return RewardSpec(rule="code_tests", options=options)
        case ModelReward():
            options = {"folder": str(config.path), "batch_size": config.batch_size, "max_tokens": config.max_tokens}
            return RewardSpec(rule="reward_model", options=options)
        case JudgeReward():
            options = config.model_dump(exclude={"kind", "path"}) | {"folder": str(config.path)}
            return RewardSpec(rule="rlinf_workers.roles.language.model_judge:ModelJudge", options=options)


def judging_s(config: RewardConfig) -> float:
    """Seconds that judging one completion takes if its text makes the reward reach its wall time limits; 0 for rewards
    without limits. Completions that are judged at the same time share them."""
    match config:
        case WeightedRewardConfig():
            return sum(judging_s(term.reward) for term in config.terms.values())
        case BySourceRewardConfig():
            return max(map(judging_s, config.sources.values()))
        case MathRewardConfig():
            return config.wall_limit_s / config.num_processes
        case CodeRewardConfig():
            return config.wall_limit_s * (MAX_TIMEOUTS if config.partial else 1) / config.num_processes
    return 0.0


def check_reward(config: RewardConfig, key: str = "reward") -> tuple[str, ...]:
    """Checks that everything the reward needs is available.

    Returns: notes for the run's manifest about weaknesses of the sandbox.

    Raises: UserError for a missing extra, folder, module or function, or a weak sandbox that is not allowed.
    """
    if members := members_of(config, key):
        return tuple(note for place, member in members.items() for note in check_reward(member, place))
    match config:
        case MathRewardConfig() if importlib.util.find_spec("math_verify") is None:
            raise UserError(f"{key}.kind=math needs math-verify", hint="pip install 'rlinf[math]'")
        case ModelReward():
            check_model_folder(config.path, key=f"{key}.path")
        case JudgeReward():
            _check_judge(config, key)
        case FunctionReward():
            try:
                get_reward(config.path)
            except RewardError as error:
                raise UserError(f"{key}.path={config.path}: {error}") from error
        case CodeRewardConfig():
            try:
                weaknesses = run_python({}, ["-c", "pass"]).weaknesses
            except RewardError as error:
                raise UserError(f"{key}.kind=code: {error}") from error
            if weaknesses and not config.allow_weak_isolation:
                raise UserError(
                    f"{key}.kind=code: the sandbox is weak on this machine: {'; '.join(weaknesses)}",
                    hint=f"allow user namespaces on it, or accept it with --{key}.allow_weak_isolation true",
                )
            return tuple(f"{key}: the sandbox for code is weak: {weakness}" for weakness in weaknesses)
    return ()


def _check_judge(config: JudgeReward, key: str) -> None:
    """Raises: UserError for a folder that is no model, and for words that it cannot tell apart."""
    from rlinf_workers.models import load_tokenizer  # imports torch
    from rlinf_workers.roles import word_tokens

    check_model_folder(config.path, key=f"{key}.path")
    try:
        word_tokens(load_tokenizer(str(config.path)), config.accepts, config.rejects)
    except RewardError as error:
        raise UserError(f"{key}.accepts: {error}") from error


def reward_folders(config: RewardConfig, key: str = "reward") -> dict[str, Path]:
    """Config key -> folder of each reward model and each judge."""
    if isinstance(config, ModelReward | JudgeReward):
        return {f"{key}.path": config.path}
    folders = (reward_folders(member, place) for place, member in members_of(config, key).items())
    return {place: folder for below in folders for place, folder in below.items()}


def blind_judges(config: RewardConfig, key: str = "reward") -> list[str]:
    """Notes about the rewards that judge problems with pictures, and do not see them."""
    match config:
        case ModelReward():
            return [f"{key}.kind=model judges the text alone: a reward model does not see the pictures of the problems"]
        case JudgeReward() if not sees(config):
            return [f"{key}.path={config.path} reads text alone, and does not see the pictures of the problems"]
        case FunctionReward():
            return [
                f"{key}.path={config.path} does not see the pictures of the problems; with a parameter `pictures` it "
                "gets their files"
            ]
    return [note for place, member in members_of(config, key).items() for note in blind_judges(member, place)]


def sees(judge: JudgeReward) -> bool:
    """Whether the judge reads pictures."""
    from rlinf_workers.models import reads_pictures  # imports torch

    return reads_pictures(judge.path)


@dataclass(frozen=True, kw_only=True, slots=True)
class TriedReward:
    """The properties of a reward that are known before the first step."""

    judges: bool
    """It judges whether an answer is right; False: it only returns scores."""
    reads_rows: bool = False
    """It reads the data row."""
    reads_pictures: bool = False
    """It reads the pictures of prompts."""


def try_rewards(config: RewardConfig, problem: TaskProblem, key: str = "reward") -> TriedReward:
    """Calls each custom function once with a real problem, and for kind code reads the problem's tests, so that
    mistakes show before a process starts.

    Args:
        problem: its answer is used as the completion.

    Raises: UserError with the place in the function where it failed, or where it hangs.
    """
    match config:
        case WeightedRewardConfig():
            tried = [try_rewards(member, problem, place) for place, member in members_of(config, key).items()]
            return TriedReward(
                judges=tried[0].judges,
                reads_rows=any(one.reads_rows for one in tried),
                reads_pictures=any(one.reads_pictures for one in tried),
            )
        case BySourceRewardConfig():
            members = members_of(config, key)
            source = problem.row.get(config.column)
            if source not in config.sources:
                raise UserError(
                    f"{key}.sources: {problem.place or 'a row'} has {config.column}={source!r}, which has no reward",
                    hint=f"known sources: {', '.join(config.sources)}; --{key}.column names another column",
                )
            place = f"{key}.sources.{source}"
            try_rewards(members[place], problem, place)
            judges = all(member.kind in JUDGES for member in members.values())
            may_see = any(isinstance(member, FunctionReward | JudgeReward) for member in members.values())
            return TriedReward(judges=judges, reads_rows=True, reads_pictures=may_see)
        case JudgeReward():
            return TriedReward(judges=True, reads_pictures=sees(config))
        case FunctionReward():
            return try_own_reward(reward_spec(config, random_stands_for="exact"), problem, f"{key}.path={config.path}")
        case CodeRewardConfig():
            try:
                read_tests(problem.answer)
            except RewardError as error:
                raise UserError(f"{key}.kind=code, {problem.place or 'a problem'}: {error}") from error
    return TriedReward(judges=config.kind in JUDGES)


def try_own_reward(spec: RewardSpec, problem: TaskProblem, what: str) -> TriedReward:
    """Like `try_rewards`, for one function; messages begin with `what`. It judges answers if it returns a bool or a
    `RewardResult` with a verdict."""
    hint = "a reward is f(completion, answer) and returns a number or a RewardResult; see docs/rewards.md"
    about = f"called once about {problem.place or 'a problem'} with the answer as completion"
    try:
        reward = make_reward(spec)
    except Exception as error:  # a custom class may raise anything
        raise UserError(f"{what}: {_message_with_place(error)}", hint=hint) from error
    try:
        row = problem.row
        if getattr(reward, "reads_pictures", False):
            row = {**row, PICTURE_FILES: tuple(file for one in problem.pictures for file in one.files)}
        (result,) = score_all(reward, [problem.answer], [problem.answer], [problem.prompt], [row])
    except RewardError as error:
        raise UserError(f"{what}, {about}: {_message_with_place(error)}", hint=hint) from error
    finally:
        close_reward(reward)
    return TriedReward(
        judges=result.has_verdict,
        reads_rows=getattr(reward, "reads_rows", False),
        reads_pictures=getattr(reward, "reads_pictures", False),
    )


def _message_with_place(error: BaseException) -> str:
    """The message and the place in the user's code that raised its cause."""
    cause = error.__cause__ or error
    frames = [
        frame
        for frame in traceback.extract_tb(cause.__traceback__)
        if "rlinf_algos" not in frame.filename and "importlib" not in frame.filename
    ]
    places = [f"\n  {frame.filename}:{frame.lineno} in {frame.name}: {frame.line}" for frame in frames[-3:]]
    return f"{error}" + ("".join(places) if error.__cause__ is not None else "")
