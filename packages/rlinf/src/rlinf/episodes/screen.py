"""Describes kept and replayed episodes in lines of text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rlinf.config.embodied import EnvConfig
from rlinf.episodes.chosen import ChosenEpisode
from rlinf.jobs.embodied.kept_episodes import StepEpisodes
from rlinf.playing.tables import summary
from rlinf_envs import ActionSpec, EpisodeEnd, ReplayedEpisode, outcome_of

LIST_COLUMNS = ("env", "episode", "task", "seed", "outcome", "return", "length")
STEP_COLUMNS = ("step", "episodes", "success at end", "at any time", "return", "length")
REWARD_COLUMNS = ("actions", "sum", "smallest", "largest")
MAX_PARTS = 8
"""Rows of the table of rewards."""
MAX_LARGEST = 3
"""Largest rewards that are named."""
NONE: Mapping[str, np.ndarray] = {}
MAX_DIMENSIONS = 16
"""Action dimensions whose share at a bound is printed."""


def list_row(chosen: ChosenEpisode) -> tuple[str, ...]:
    """Returns a row of `LIST_COLUMNS`."""
    end, is_cut = chosen.episode.end, chosen.episode.is_cut
    outcome = "cut by the step's end" if is_cut else outcome_of(end)
    numbers = (str(end.env_index), str(chosen.position))
    return (*numbers, end.task or "-", str(end.seed), outcome, f"{end.return_:.3f}", str(end.length))


def step_row(step: StepEpisodes) -> tuple[str, ...]:
    """Returns a row of `STEP_COLUMNS`; means are of the episodes that the step's end did not cut."""
    means = summary([episode.end for episode in step.episodes if not episode.is_cut])
    shares = ("-" if means[key] is None else f"{means[key]:.1%}" for key in ("success_at_end", "success_once"))
    numbers = ("-" if means[key] is None else f"{means[key]:.4g}" for key in ("return", "episode_length"))
    return (str(step.step), str(len(step.episodes)), *shares, *numbers)


def episode_lines(chosen: ChosenEpisode, replayed: ReplayedEpisode, env: EnvConfig) -> list[str]:
    """Describes a kept episode: what it was and how it ended."""
    episode = chosen.episode
    task = replayed.recorded.end.task
    lines = [
        f"step {chosen.step}, {_place(episode.end.env_index, env)}, episode {chosen.position}: "
        f"{env.id}{f', {task}' if task else ''}",
        f"seed {episode.end.seed}, acted by "
        + (f"the weights after step {chosen.weights_step}" if chosen.weights_step else "the first weights"),
    ]
    if replayed.instruction is not None:
        lines.append(f"instruction: {replayed.instruction}")
    return [*lines, _ending(episode.end, is_cut=episode.is_cut)]


def replay_lines(replayed: ReplayedEpisode, actions: ActionSpec) -> list[str]:
    """Says when a replayed episode was solved, how its actions lie in their bounds, and whether it is the kept one."""
    return [
        *_success_lines(replayed.recorded.successes),
        *_bound_lines(replayed.recorded.actions, actions),
        f"replayed: not the kept episode. {replayed.difference}"
        if replayed.difference
        else "replayed: rewards and outcome equal the kept ones to the bit",
    ]


def continued_lines(replayed: ReplayedEpisode, num_actions: int, checkpoint: str) -> list[str]:
    """Says whether the first actions were as in the kept episode, and what became of it with those of a checkpoint."""
    return [
        f"replayed up to action {num_actions}: "
        + (f"not the kept episode. {replayed.difference}" if replayed.difference else "rewards equal to the bit"),
        f"continued by {checkpoint}: {_ending(replayed.recorded.end, is_cut=False)}",
        *_success_lines(replayed.recorded.successes),
    ]


def _ending(end: EpisodeEnd, *, is_cut: bool) -> str:
    outcome = "cut by the step's end" if is_cut else outcome_of(end)
    return f"{end.length} actions, return {end.return_:.6g}, {outcome}"


def _place(env_index: int, env: EnvConfig) -> str:
    if env.episodes_per_step is not None:
        return f"start {env_index}"
    group, row = divmod(env_index, env.num_envs // env.num_groups)
    return f"environment {env_index} (row {row} of group {group})"


def _success_lines(successes: np.ndarray | None) -> list[str]:
    """Says after which actions the task became solved and unsolved."""
    if successes is None:
        return []
    changes = np.flatnonzero(np.diff(successes.astype(np.int8), prepend=0))
    if not len(changes):
        return ["the task never counted as solved"]
    words = [f"{'solved' if successes[time] else 'unsolved'} after action {time + 1}" for time in changes]
    return [", ".join(words[:6]) + (", ..." if len(words) > 6 else "")]


def _bound_lines(taken: np.ndarray, spec: ActionSpec) -> list[str]:
    """Says how many numbers of continuous actions are at a bound, to which larger ones are clipped."""
    if spec.kind != "continuous":
        return []
    at_bound = ((taken <= spec.low.numpy()) | (taken >= spec.high.numpy())).reshape(len(taken), -1)
    by_dimension = ", ".join(f"{share:.0%}" for share in at_bound.mean(axis=0)[:MAX_DIMENSIONS])
    more = ", ..." if at_bound.shape[1] > MAX_DIMENSIONS else ""
    return [f"actions at a bound, to which larger ones are clipped: {at_bound.mean():.1%} ({by_dimension}{more})"]


def reward_rows(rewards: np.ndarray, components: Mapping[str, np.ndarray] = NONE) -> list[tuple[str, ...]]:
    """Returns rows of `REWARD_COLUMNS`, each of a part of the episode, with the sum of each component."""
    parts = [part for part in np.array_split(np.arange(len(rewards)), MAX_PARTS) if len(part)]
    sums = [(*_sums(rewards[part]), *(float(values[part].sum()) for values in components.values())) for part in parts]
    return [(_span(part), *(f"{n:.4g}" for n in numbers)) for part, numbers in zip(parts, sums, strict=True)]


def component_line(rewards: np.ndarray, components: Mapping[str, np.ndarray]) -> str:
    """Says which components the rewards of an episode have, and whether they add up."""
    sums = ", ".join(f"{name} {values.sum():.4g}" for name, values in components.items())
    adds_up = np.allclose(sum(components.values()), rewards, rtol=1e-4, atol=1e-5)
    return f"components of the reward: {sums}; they {'add' if adds_up else 'do not add'} up to it"


def largest_rewards(rewards: np.ndarray) -> str:
    """Says which actions had the rewards of largest magnitude."""
    nonzero = np.flatnonzero(rewards)
    if not len(nonzero):
        return "all rewards are 0"
    order: Sequence[int] = sorted(nonzero.tolist(), key=lambda time: -abs(float(rewards[time])))[:MAX_LARGEST]
    named = ", ".join(f"{rewards[time]:.4g} at action {time + 1}" for time in order)
    of = "every action" if len(nonzero) == len(rewards) else f"{len(nonzero)} of {len(rewards)} actions"
    return f"rewards at {of}; the largest: {named}"


def _span(part: np.ndarray) -> str:
    first, last = part[0] + 1, part[-1] + 1
    return f"{first}" if first == last else f"{first}-{last}"


def _sums(rewards: np.ndarray) -> tuple[float, float, float]:
    return float(rewards.sum(dtype=np.float64)), float(rewards.min()), float(rewards.max())
