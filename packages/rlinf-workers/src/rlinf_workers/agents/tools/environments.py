"""Text environments: partners that answer each turn of the policy with a text and a reward.

A `TextEnvironment` belongs to one episode; the loop (loop.py) plays it. `make_environments` returns what creates them
by name: `gymnasium` for environments of Gymnasium whose observations and actions are texts, `openenv` for servers of
OpenEnv, or the import path of a class. Each is wrapped in the checks of `CheckedEnvironment`, so that a failure says
who caused it.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import math
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, cast

import msgspec

from rlinf_algos import AlgosError
from rlinf_workers.agents.tools.base import Failure, ToolFailed, ToolUnavailable
from rlinf_workers.agents.tools.checked import CLOSING_LIMIT_S, settled
from rlinf_workers.agents.tools.limits import check_limits, cut, unicode_text
from rlinf_workers.agents.tools.threads import DaemonThread
from rlinf_workers.plugins import Plugins, Spec

_LOG = logging.getLogger(__name__)
ENVIRONMENTS: Plugins[Spec] = Plugins(
    "text environment",
    {
        "gymnasium": "rlinf_workers.agents.tools.environments:SPEC",
        "openenv": "rlinf_workers.agents.tools.openenv:SPEC",
    },
    base="rlinf_workers.plugins:Spec",
)
"""Text environments by name. A custom one is the import path of a class."""


class TextStep(msgspec.Struct, frozen=True, kw_only=True):
    """What an environment answers.

    Example: TextStep(text="You are in the kitchen.", reward=0.0)
    """

    text: str
    """What the policy reads next; at the end it may be empty."""
    reward: float = 0.0
    """Of the turn that is answered; 0.0 after a reset."""
    terminated: bool = False
    """The episode has ended by the environment's rules."""
    truncated: bool = False
    """The environment has ended the episode early, for example at its limit of steps."""
    failure: Failure = ""
    """policy: the environment did not take the text and nothing has changed; service: it failed, and the episode cannot
    go on."""
    detail: str = ""
    """For people: what happened, with the traceback of an unexpected exception."""
    wall_s: float = 0.0


class TextEnvironment(Protocol):
    """One episode of an environment. Those of `make_environments` raise nothing but asyncio.CancelledError."""

    async def reset(self, seed: int, row: Mapping[str, Any]) -> TextStep:
        """Begins the episode; the text is what the policy reads after the prompt.

        Args:
            seed: the same for all episodes of a prompt.
            row: all columns of the row that the prompt comes from.
        """
        ...

    async def step(self, text: str) -> TextStep:
        """Answers a turn of the policy. Raises: ToolFailed: this text is not possible here."""
        ...

    async def close(self) -> None:
        """Releases what it holds; may be called at any time, and more than once."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentLimits:
    """Limits of every environment."""

    time_limit_s: float = 60.0
    """Deadline of creating, resetting and stepping, each. That it expires is a failure of the service."""
    max_characters: int = 16_000
    """Longer texts are cut in the middle."""

    def __post_init__(self) -> None:
        check_limits(self.time_limit_s, self.max_characters)


LIMITS = Spec(name="text environment", options=EnvironmentLimits)


def make_environments(entry: Mapping[str, Any]) -> Callable[[], CheckedEnvironment]:
    """A function that creates the environment of an episode; creating costs nothing before `reset`.

    Args:
        entry: `name` (`gymnasium`, `openenv`, or the import path of a class of `TextEnvironment`s), its options,
            `time_limit_s` and `max_characters`: {"name": "gymnasium", "id": "my_module:Game"}.

    Raises:
        AlgosError: no such name.
        OptionError: an unknown option, or one with an invalid value.
    """
    name, options, limits = _read(entry)
    spec = ENVIRONMENTS.spec(name)
    plugin: Any = spec.load()
    if spec.options is not None:
        arguments = (spec.read(options),)
        return lambda: CheckedEnvironment(lambda: plugin(*arguments), limits)
    if not isinstance(plugin, type):
        raise AlgosError(f"the text environment {name!r} is a {type(plugin).__name__}, not a class")
    return lambda: CheckedEnvironment(lambda: cast(Any, plugin)(**options), limits)


def check_environment(entry: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The problems of an entry, without importing a custom class: option ("" for the environment itself), message."""
    try:
        name, options, _ = _read(entry)
        ENVIRONMENTS.locate(name)
    except AlgosError as error:
        yield "", str(error)
        return
    if ":" not in name:
        yield from ENVIRONMENTS.spec(name).problems(options)


def _read(entry: Mapping[str, Any]) -> tuple[str, dict[str, Any], EnvironmentLimits]:
    options = dict(entry)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise AlgosError(f"an environment needs the key `name`, its name or import path; got {sorted(options)}")
    limits = LIMITS.read({key: options.pop(key) for key in ("time_limit_s", "max_characters") if key in options})
    return name, options, limits


class CheckedEnvironment:
    """An environment of one episode, whose failures become results."""

    def __init__(self, create: Callable[[], TextEnvironment], limits: EnvironmentLimits | None = None) -> None:
        self._create, self._limits = create, limits or EnvironmentLimits()
        self._environment: TextEnvironment | None = None
        self._has_ended = False

    async def reset(self, seed: int, row: Mapping[str, Any]) -> TextStep:
        async def action() -> TextStep:
            if self._environment is None:
                self._environment = self._create()
            return await self._environment.reset(seed, row)

        self._has_ended = False
        return await self._guarded("reset", action())

    async def step(self, text: str) -> TextStep:
        async def action() -> TextStep:
            if self._environment is None or self._has_ended:
                raise ToolUnavailable("the episode has ended, or has not begun")
            return await self._environment.step(text)

        return await self._guarded("step", action())

    async def close(self) -> None:
        environment, self._environment = self._environment, None
        if environment is not None:
            _, failure, detail = await settled("close", environment.close(), CLOSING_LIMIT_S)
            if failure:
                _LOG.warning("an environment did not close: %s", detail)

    async def _guarded(self, name: str, action: Coroutine[Any, Any, TextStep]) -> TextStep:
        start = time.monotonic()
        step, failure, detail = await settled(f"{name} of the environment", action, self._limits.time_limit_s)
        if failure == "" and (problem := _problem(step)):
            step, failure, detail = None, "service", f"{name} returned {problem}"
        if step is None:
            text = detail if failure == "policy" else ""
            step = TextStep(text=text, failure=failure, detail=detail)
        self._has_ended |= step.terminated or step.truncated or step.failure == "service"
        return msgspec.structs.replace(
            step,
            text=cut(unicode_text(step.text), self._limits.max_characters),
            wall_s=time.monotonic() - start,
        )


def _problem(step: Any) -> str:
    """What is wrong with an environment's answer; "": nothing."""
    if not isinstance(step, TextStep):
        return f"a {type(step).__name__}, not a TextStep"
    if not isinstance(step.text, str):
        return f"a {type(step.text).__name__} as the text"
    if not isinstance(step.reward, int | float) or not math.isfinite(step.reward):
        return f"the reward {step.reward!r}"
    return ""


@dataclass(frozen=True, kw_only=True, slots=True)
class GymnasiumOptions:
    """Options of an environment of Gymnasium."""

    id: str
    """Its registered id, "package.module:Name-v0" (Gymnasium imports the module first), or the import path of its
    class, "package.module:Class"."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Keyword arguments of its constructor."""


SPEC = Spec(
    name="gymnasium",
    implementation="rlinf_workers.agents.tools.environments:GymnasiumEnvironment",
    options=GymnasiumOptions,
)


class GymnasiumEnvironment:
    """An environment of Gymnasium whose observations and actions are texts (`gymnasium.spaces.Text`).

    It runs in a thread of its own. An action that the action space does not contain is refused without a step, as a
    failure of the policy.
    """

    def __init__(self, options: GymnasiumOptions) -> None:
        self._options = options
        self._thread = DaemonThread(f"environment {options.id}")
        self._env: Any = None

    async def reset(self, seed: int, row: Mapping[str, Any]) -> TextStep:
        """Gymnasium's `reset` gets the row as its `options`.

        Raises: ToolUnavailable: there is no such environment, or it has other spaces.
        """
        if self._env is None:
            self._env = await self._thread.run(self._make)
        observation, _ = await self._thread.run(self._env.reset, seed=seed, options=dict(row))
        return TextStep(text=observation)

    async def step(self, text: str) -> TextStep:
        """Raises: ToolFailed: the action space does not contain the text."""
        if not self._env.action_space.contains(text):
            raise ToolFailed(f"This is no possible action: {cut(text, 200)!r}. Possible: {self._env.action_space}")
        observation, reward, terminated, truncated, _ = await self._thread.run(self._env.step, text)
        return TextStep(text=observation, reward=float(reward), terminated=bool(terminated), truncated=bool(truncated))

    async def close(self) -> None:
        if self._env is not None:
            await self._thread.run(self._env.close)
        self._thread.close()

    def _make(self) -> Any:
        import gymnasium

        module, _, name = self._options.id.partition(":")
        try:
            member = getattr(importlib.import_module(module), name, None) if name else None
            if inspect.isclass(member):
                env: Any = member(**self._options.arguments)
            else:
                env = gymnasium.make(self._options.id, **self._options.arguments)
        except (ImportError, gymnasium.error.Error) as error:
            raise ToolUnavailable(f"there is no environment {self._options.id!r}: {error}") from error
        for what in ("observation_space", "action_space"):
            if not isinstance(getattr(env, what), gymnasium.spaces.Text):
                env.close()
                raise ToolUnavailable(f"{self._options.id} has the {what} {getattr(env, what)}, not a Text")
        return env
