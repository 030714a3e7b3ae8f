"""How episodes run: which agent, with which tools, within which limits."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from rlinf_comm import record

LOOP = "loop"
"""`EpisodeSettings.run` of the agent that is built in (loop.py)."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class NamedAgent:
    """An agent of a job that has several."""

    trains: bool = True
    """Whether its turns have a loss."""
    folder: str | None = None
    """Model folder of a partner that does not train, or with which the policy of `trainer` begins; None: the model of
    the job's policy."""
    trainer: str = ""
    """Worker group whose weights it speaks with, a policy beside the job's; empty: the job's policy, or a partner."""
    policy: str = ""
    """Name of that policy in metrics; empty: `trainer`."""
    stop_ids: list[int] = field(default_factory=list)
    """Tokens at which the partner's engine ends a turn; set by the rank."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class PictureSettings:
    """How the pictures of messages are read."""

    folder: str
    """Of the model: its image processor."""
    min_pixels: int | None = None
    max_pixels: int | None = None
    """As for `PictureProcessor`."""
    fetches: bool = False
    """Whether pictures with http(s) URLs are fetched."""
    sends_files: bool = False
    """Whether the rank gets the files of pictures too, for a record."""


@record
@dataclass(frozen=True, kw_only=True, slots=True)
class EpisodeSettings:
    """The settings of the agents of a rollout rank."""

    run: str = LOOP
    """`loop`, or `package.module:function` of a harness (harness.py)."""
    tools: list[str | dict[str, Any]] = field(default_factory=list)
    """What the loop may call, as `tools.make_tools` reads it."""
    environment: dict[str, Any] | None = None
    """What reads the loop's answers, as `tools.make_environments` reads it; None: an answer ends the episode."""
    agents: dict[str, NamedAgent] = field(default_factory=dict)
    """The agents by name; empty: there is one, without a name."""
    max_turns: int
    """Turns of the policy in an episode."""
    max_context_tokens: int
    """Tokens of a history, the last turn included."""
    max_new_tokens: int
    """Tokens of a turn."""
    max_episodes: int
    """Episodes that run at once on a rank."""
    max_idle_s: float
    """Time that an episode may spend outside the engine, in tools and in the harness."""
    num_retries: int = 1
    """How often an episode is done again that ended by what the policy cannot have caused."""
    max_discarded: float = 0.2
    """Share of a step's episodes that may end by what the policy cannot have caused."""
    python: str | None = None
    """Interpreter of the harness; None: this one."""
    routed: bool = False
    """Whether a router runs the episodes of all ranks and gives each turn to one of their engines; False: each rank
    runs its own."""
    tokenizer_folder: str
    stop_ids: list[int] = field(default_factory=list)
    """Tokens at which the engine ends a turn; set by the rank."""
    chat_options: dict[str, Any] = field(default_factory=dict)
    """Arguments of the chat template."""
    pictures: PictureSettings | None = None
    """None: the model reads text alone."""

    @property
    def trained_agents(self) -> tuple[str, ...]:
        """The agents by name whose turns the job's policy learns from."""
        return tuple(name for name, agent in self.agents.items() if agent.trains and not agent.trainer)

    @property
    def agents_by_trainer(self) -> dict[str, tuple[str, ...]]:
        """Worker group that trains a further policy -> the agents by name whose turns it learns from."""
        trained = [(name, agent.trainer) for name, agent in self.agents.items() if agent.trains and agent.trainer]
        return {trainer: tuple(name for name, of in trained if of == trainer) for _, trainer in trained}

    @property
    def further_policies(self) -> dict[str, str]:
        """Worker group that trains a further policy -> the policy's name in metrics."""
        return {agent.trainer: agent.policy or agent.trainer for agent in self.agents.values() if agent.trainer}

    @property
    def partner_folders(self) -> dict[str, str]:
        """Agent -> the folder of a partner's model."""
        return {name: agent.folder for name, agent in self.agents.items() if agent.folder is not None}

    @property
    def max_prompt_tokens(self) -> int:
        """Tokens that a turn may follow: a whole turn still has room after them."""
        return self.max_context_tokens - self.max_new_tokens
