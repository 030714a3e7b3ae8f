"""Checks a robot policy against demonstrations: all comparisons, and a verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from rlinf.conventions.alternative import Alternative
from rlinf.conventions.answers import Answers
from rlinf.conventions.environment import FrameMismatch, Replays
from rlinf.conventions.frames import ComparedFrames
from rlinf.conventions.numbers import DeadInput, dead_inputs
from rlinf.conventions.scoring import TRIVIAL, OpenLoopError, baselines, is_better
from rlinf.conventions.search import SearchResult, search


@dataclass(frozen=True, kw_only=True, slots=True)
class Cause:
    """A convention that is wrong, and why that is known."""

    convention: str
    change: str
    """What is right instead."""
    evidence: str
    setting: str
    """What the user has to change."""
    equivalents: tuple[Cause, ...] = ()
    """Other conventions that would explain the demonstrations as well."""
    hides: str = ""
    """What cannot be seen before this is mended; empty: it hides nothing."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConventionVerdict:
    """The result of checking one set-up."""

    frames: ComparedFrames
    search: SearchResult
    baselines: Mapping[str, OpenLoopError]
    causes: tuple[Cause, ...]
    """The first one explains most. Empty: nothing is wrong, or nothing that was tried explains the error."""
    refused: Mapping[str, str]
    """Alternatives that could not be tried, and why."""
    replays: Replays | None = None
    lines: tuple[str, ...] = field(default=())
    """What the numbers of the demonstrations say."""

    @property
    def predicts(self) -> bool:
        """Whether the policy as configured predicts the demonstrations better than the mean action."""
        error = self.search.as_configured.error
        return is_better(error, self.baselines[TRIVIAL], num_comparisons=1)

    @property
    def passes(self) -> bool:
        return self.predicts and not self.causes


def check_conventions(
    answers: Answers,
    reads: Sequence[str],
    alternatives: Sequence[Alternative],
    *,
    closer: ComparedFrames | None = None,
    mismatches: Sequence[FrameMismatch] = (),
    replays: Replays | None = None,
    lines: Sequence[str] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> ConventionVerdict:
    """Compares a policy with frames as configured and under alternatives.

    Args:
        answers: the policy and the frames.
        reads: the fields that the policy reads.
        closer: more frames of the same demonstrations, for gains that those of `answers` do not prove.
        mismatches, replays, lines: results of comparing the demonstrations with the environment.
    """
    frames = answers.frames
    causes = [_of_dead_input(one) for one in dead_inputs(frames, reads)]
    causes += [_of_mismatch(one) for one in mismatches]
    if replays is not None and replays.failed:
        causes.append(_of_replays(replays))
    result = search(answers, alternatives, closer=closer, max_causes=1 if causes else 2, progress=progress)
    causes += [
        _of_alternative(one, result, tuple(_of_alternative(other, result) for other in others))
        for one, others in zip(result.causes, result.equivalents, strict=True)
    ]
    return ConventionVerdict(
        frames=frames,
        search=result,
        baselines=baselines(frames),
        causes=tuple(causes),
        refused=answers.refused,
        replays=replays,
        lines=tuple(lines),
    )


def _of_dead_input(dead: DeadInput) -> Cause:
    return Cause(
        convention=dead.convention,
        change="an input that carries nothing",
        evidence=dead.evidence,
        setting=dead.setting,
        hides=dead.hides,
    )


def _of_mismatch(mismatch: FrameMismatch) -> Cause:
    return Cause(
        convention=mismatch.convention,
        change=f"environment and demonstrations differ: {mismatch.change}",
        evidence=mismatch.evidence,
        setting="let the environment show what was recorded (env.options)",
    )


def _of_replays(replays: Replays) -> Cause:
    return Cause(
        convention="environment",
        change="the environment does not do what the demonstrations' actions did",
        evidence=replays.text,
        setting="use the controller, action repeat and time limit of the demonstrations (env.options)",
    )


def _of_alternative(alternative: Alternative, result: SearchResult, equivalents: tuple[Cause, ...] = ()) -> Cause:
    before, after = result.as_configured.error.mean, result.explained.error.mean
    both = " with both changes" if len(result.causes) > 1 else ""
    closely = f" (judged by {result.num_close_frames} frames)" if result.num_close_frames else ""
    return Cause(
        convention=alternative.convention,
        change=alternative.change,
        evidence=f"the open-loop error falls from {before:.2f} to {after:.2f}{both}{closely}",
        setting=alternative.setting,
        equivalents=equivalents,
    )
