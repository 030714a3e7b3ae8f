"""Config of agents: episodes of many turns, tools, agents by name, and the policies that they speak with."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from rlinf.config.base import Conflict, ModelPath, Section
from rlinf.config.common import EngineConfig

AgentName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]{0,63}$")]


def trainer_of(policy: str) -> str:
    """The worker group that trains a further policy."""
    return f"actor-{policy}"


def _environment_by_name(value: Any) -> Any:
    """`environment: my_module:Game` means `environment: {name: my_module:Game}`."""
    return {"name": value} if isinstance(value, str) else value


class NamedAgentConfig(Section):
    """An agent of a task with several (docs/agents.md)."""

    trains: bool = Field(
        default=True, description="Whether its turns are trained, with a baseline of its own; false: it only plays."
    )
    path: ModelPath | None = Field(
        default=None,
        description="Folder, or name on the Hub, of a model of its own. With trains: false the agent is a partner, "
        "whose weights never change; otherwise a further policy begins with it. null: model.path.",
    )
    policy: AgentName | None = Field(
        default=None,
        description="A further policy, by any name, which a worker group of its own trains; agents with the same name "
        "share it. null: the policy of model.path, but an agent with a path that trains has a policy of its own name.",
    )


class AgentConfig(Section):
    """Episodes of many turns in place of completions (docs/agents.md)."""

    run: str = Field(
        default="loop",
        min_length=1,
        description="The agent. loop: the policy answers, the calls in its answer are made, and their results follow, "
        "until it answers without a call. package.module:function: a custom harness, `async def run(base_url, task, *, "
        "session)`, which talks to the policy through OpenAI's or Anthropic's interface at base_url and returns a "
        "reward, or None for the reward of the recipe.",
    )
    tools: list[str | dict[str, Any]] = Field(
        default=[],
        description="What the policy may call: python, shell, search, mcp, package.module:function, or a mapping with "
        "`tool` and its options. The loop makes the calls; an agent in RLinf's process finds them in session.tools.",
    )
    environment: Annotated[dict[str, Any] | None, BeforeValidator(_environment_by_name)] = Field(
        default=None,
        description="A text environment that reads the answers of the loop's policy, says what follows, and rewards "
        "them: package.module:Class, or a mapping with `name` (gymnasium, openenv, package.module:Class) and its "
        "options. Needs reward.kind=episode. null: an answer ends the episode.",
    )
    agents: dict[AgentName, NamedAgentConfig] = Field(
        default={},
        description="Agents by name, such as {solver: {}, judge: {trains: false}}: a request names one as its model. "
        "Each has conversations and a reward of its own. Empty: there is one agent, without a name.",
    )
    max_turns: int = Field(default=8, ge=1, description="Turns of the policy in an episode.")
    max_context_tokens: int = Field(
        ge=2,
        description="Tokens of a whole conversation. A turn only begins if rollout.max_new_tokens, the limit of a "
        "turn, still fits.",
    )
    max_episodes: int = Field(default=256, ge=1, description="Episodes that a rank runs at once.")
    max_idle_s: float = Field(
        default=300.0,
        gt=0,
        description="Time that an episode may spend outside the engine, in tools and in the harness.",
    )
    num_retries: int = Field(
        default=1,
        ge=0,
        description="How often an episode is repeated that ended by what the policy cannot have caused, such as a tool "
        "that cannot be reached. After that it is discarded, and its group is compared without it.",
    )
    max_discarded: float = Field(
        default=0.2, ge=0, le=1, description="Share of a step's episodes that may be discarded before the run stops."
    )
    expected_turns: float | None = Field(
        default=None,
        ge=1,
        description="Turns of an episode that rlinf plan expects; null: half of max_turns, at least 1.",
    )
    expected_tool_s: float = Field(
        default=0.0,
        ge=0,
        description="Seconds in tools or the harness that rlinf plan expects after each turn but the last.",
    )
    router: bool = Field(
        default=True,
        description="Whether a router runs the episodes of up to eight ranks: it gives each turn to the engine that "
        "has the conversation in its cache, or to one with much less to do, and episodes survive the loss of a rank. "
        "Not with run.record, rollout.sampler: as_finished, rollout.on_new_weights other than finish or a model that "
        "reads pictures. false: each rank runs the episodes of its own prompts.",
    )
    python: str | None = Field(
        default=None, description="Python interpreter of a custom harness, in a venv of its own; null: RLinf's."
    )

    @property
    def episode_options(self) -> dict[str, Any]:
        """Its keys that `EpisodeSettings` has under the same names."""
        return self.model_dump(exclude={"agents", "expected_turns", "expected_tool_s", "router"})

    @property
    def planned_turns(self) -> float:
        """Turns of an episode for the planner."""
        return max(1.0, self.max_turns / 2) if self.expected_turns is None else self.expected_turns

    def conflicts(self) -> Iterator[Conflict]:
        if self.expected_turns is not None and self.expected_turns > self.max_turns:
            yield Conflict(
                keys=("rollout.agent.expected_turns", "rollout.agent.max_turns"),
                text=f"={self.expected_turns:g} is more than rollout.agent.max_turns={self.max_turns}",
            )
        if self.run != "loop" and ":" not in self.run:
            yield Conflict(
                keys=("rollout.agent.run",),
                text=f"={self.run} is neither loop nor package.module:function of a custom harness",
            )
        if self.run != "loop" and self.environment:
            yield Conflict(
                keys=("rollout.agent.environment", "rollout.agent.run"),
                text=f" is not used: {self.run} brings its own; leave it out, or use run=loop",
            )
        yield from self._named_conflicts()
        if self.run == "loop" and self.python is not None:
            yield Conflict(
                keys=("rollout.agent.python", "rollout.agent.run"),
                text=f"={self.python} is not used: it is for a custom harness; leave it out",
            )

    def policy_of(self, agent: str) -> str | None:
        """The further policy that an agent speaks with; None: the policy of model.path, or a partner."""
        settings = self.agents[agent]
        return settings.policy or (agent if settings.path is not None and settings.trains else None)

    @property
    def further_policies(self) -> dict[str, Path | None]:
        """Further policy that is trained -> the model that it begins with; None: the one that model.path's begins
        with."""
        policies: dict[str, Path | None] = {}
        for name, agent in self.agents.items():
            if (policy := self.policy_of(name)) is not None:
                policies[policy] = policies.get(policy) or agent.path
        return policies

    @property
    def partner_paths(self) -> dict[str, Path]:
        """Agent -> the model of a partner."""
        paths = {name: agent.path for name, agent in self.agents.items() if self.policy_of(name) is None}
        return {name: path for name, path in paths.items() if path is not None}

    @property
    def models(self) -> dict[str, Path]:
        """Agent -> the model that it speaks with, or its policy begins with, where it is another than model.path."""
        policies = {name: self.policy_of(name) for name in self.agents}
        begun = {name: self.further_policies[policy] for name, policy in policies.items() if policy is not None}
        return {name: path for name, path in (self.partner_paths | begun).items() if path is not None}

    def trained_agents(self, policy: str | None) -> tuple[str, ...]:
        """The agents by name whose turns a policy learns from; None: the policy of model.path."""
        return tuple(name for name, agent in self.agents.items() if agent.trains and self.policy_of(name) == policy)

    def _named_conflicts(self) -> Iterator[Conflict]:
        if not self.agents:
            return
        if self.run == "loop":
            yield Conflict(
                keys=("rollout.agent.agents", "rollout.agent.run"),
                text=f"={', '.join(self.agents)}: run=loop is one agent; give a function that lets each of them speak",
            )
        if not any(agent.trains for agent in self.agents.values()):
            yield Conflict(
                keys=("rollout.agent.agents",),
                text=f": none of {', '.join(self.agents)} trains; set trains: true for at least one",
            )
        elif not self.trained_agents(None):
            yield Conflict(
                keys=("rollout.agent.agents",),
                text=f": all of {', '.join(self.agents)} that train have a further policy, and the policy of "
                "model.path would not train; leave path and policy of one of them out",
            )
        for policy, path in self.further_policies.items():
            yield from self._policy_conflicts(policy, path)

    def _policy_conflicts(self, policy: str, path: Path | None) -> Iterator[Conflict]:
        """A policy begins with one model, and one of its agents trains it."""
        members = {name: agent for name, agent in self.agents.items() if self.policy_of(name) == policy}
        at = "rollout.agent.agents."
        for name, agent in members.items():
            if agent.path not in (None, path):
                yield Conflict(
                    keys=(f"{at}{name}.path", f"{at}{name}.policy"),
                    text=f"={agent.path}: the policy {policy} begins with {path}, the path of another of its agents; "
                    "give one path, or another policy",
                )
        if not self.trained_agents(policy):
            name = next(iter(members))
            yield Conflict(
                keys=(f"{at}{name}.policy", f"{at}{name}.trains"),
                text=f"={policy}: none of its agents ({', '.join(members)}) trains it; set trains: true for one of "
                "them, or leave the policy out",
            )

    def options_of_engines(self, engine: EngineConfig, *, on_gpu: bool) -> Mapping[str, Any] | None:
        """`engine_options` of each engine of a rank, which has one for each model; None: it cannot have several."""
        num_engines = 1 + len(set(self.partner_paths.values())) + len(self.further_policies)
        if num_engines == 1:
            return engine.engine_options
        return engine.engine_spec.options_beside(engine.engine_options, num_engines, on_gpu=on_gpu)

    def engine_conflicts(self, engine: EngineConfig) -> Iterator[Conflict]:
        """Episodes need an engine that takes turns while it generates, and agents with another model or policy one
        beside the first."""
        if (problem := engine.engine_spec.episodes_problem(engine.engine_options)) is not None:
            yield Conflict(
                keys=(f"{engine.AT}agent", f"{engine.AT}engine"),
                text=f": episodes need an engine that takes turns while it generates, and {engine.AT}engine="
                f"{engine.engine} does not: {problem}",
            )
        if self.options_of_engines(engine, on_gpu=True) is None:
            key, value = next(self.keys_of_engines(engine.AT))
            yield Conflict(
                keys=(key, f"{engine.AT}engine"),
                text=f"={value}: it needs an engine of its own beside that of model.path, and {engine.AT}engine="
                f"{engine.engine} cannot share a device with another; use huggingface",
            )

    def keys_of_engines(self, at: str) -> Iterator[tuple[str, str]]:
        """The keys that ask for a further engine, and their values.

        Args:
            at: before `agent`.
        """
        for name, agent in self.agents.items():
            if agent.path is not None:
                yield f"{at}agent.agents.{name}.path", str(agent.path)
            elif agent.policy is not None:
                yield f"{at}agent.agents.{name}.policy", agent.policy


def agent_by_name(value: Any) -> Any:
    """`agent: my_module:run` means `agent: {run: my_module:run}`."""
    return {"run": value} if isinstance(value, str) else value
