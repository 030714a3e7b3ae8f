"""Searches the alternatives, one and two at a time, for those under which a policy predicts the demonstrations.

An alternative is a cause if all of this holds by the rule of `scoring.is_better`:

- With it, the policy predicts better than without it.
- With it, the predictions, shrunk at best, are better than the mean action, so they say something.
- It does more than shrink noisy predictions, which lowers any error: it brings their scale closer to that of the
  demonstrations, or is better than the best shrinkage of the predictions without it.

If the lowest errors are lower by `scoring.LEAST_GAIN` and fail one of these tests, they are judged again by more frames
of the same demonstrations. Every test counts all alternatives as tried, so that each of the two rounds accuses a right
set-up with a probability of `scoring.LEVEL`.

Two alternatives are causes together if the second one changes the result of the first by the same rule, or if both
change what the best single one leaves. Alternatives that lower the error as much as a cause, such as two rescalings by
statistics that happen to be equal, are its equivalents: the demonstrations cannot tell them apart.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import permutations

from rlinf.conventions.actions import RESCALING
from rlinf.conventions.alternative import Alternative
from rlinf.conventions.answers import Answers
from rlinf.conventions.frames import ComparedFrames
from rlinf.conventions.scoring import LEAST_GAIN, OpenLoopError, is_better, open_loop_error, shrunk, slope

NUM_BEAMS = 4
"""Alternatives, the best ones, that are combined with every other one that needs new answers."""
EXPLAINED = 0.1
"""Error below which no other pair is tried than a cause and a second one: a tenth of the variance, as in
`scoring.LEAST_GAIN`."""
EXACT = 0.01
"""Error below which nothing at all is looked for beside a cause."""
NUM_CLOSE = 3
"""Different answers, those of the lowest errors, that are judged by more frames."""
AS_GOOD = 0.01
"""Share of the lowest error by which the error of an equivalent may be higher."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Trial:
    """A set-up with some alternatives and what it scores."""

    alternatives: tuple[Alternative, ...]
    error: OpenLoopError
    shrunk: OpenLoopError
    """With the predictions shrunk by the factors that lower the error most."""
    slope: float
    """By how much predictions change with demonstrated actions; 1 for exact ones and for exact ones with noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchResult:
    """What the search has tried."""

    as_configured: Trial
    singles: tuple[Trial, ...]
    """With one alternative, the lowest error first."""
    causes: tuple[Alternative, ...]
    """None, one or two; the one without which the error is larger first."""
    equivalents: tuple[tuple[Alternative, ...], ...]
    """For each cause, alternatives of other conventions that lower the error as much in its place."""
    explained: Trial
    """With the causes."""
    num_trials: int
    num_close_frames: int
    """Frames by which a cause was judged, if more were needed than those of the errors; else 0."""


class _Search:
    def __init__(self, answers: Answers, alternatives: Sequence[Alternative], closer: ComparedFrames | None) -> None:
        self._answers = answers
        self._closer = answers.on(closer) if closer is not None else None
        self._alternatives = alternatives
        self._mean_action = _mean_action(answers.frames)
        self._num_close_frames = 0

    def run(self, max_causes: int, progress: Callable[[str], None]) -> SearchResult:
        base = self._tried(())
        assert base is not None, "the policy as configured was checked before"
        singles = self._all([(one,) for one in self._alternatives], progress)
        best, trials = self._best(singles, than=base), singles
        num_trials = 1 + len(singles)
        if max_causes > 1 and best is not None and best.error.mean > EXACT:
            extended = self._all(self._extensions(best), progress)
            num_trials += len(extended)
            if pair := self._best(extended, than=best):
                best, trials = pair, extended
        if max_causes > 1 and self._is_unexplained(best, base):
            pairs = self._pairs(singles, progress)
            num_trials += len(pairs)
            if pair := self._best(pairs, than=best or base):
                best, trials = pair, pairs
        explained = best or base
        causes = self._ordered(explained.alternatives)
        return SearchResult(
            as_configured=base,
            singles=tuple(sorted(singles, key=lambda trial: trial.error.mean)),
            causes=causes,
            equivalents=tuple(_equivalents(explained, one, trials) for one in causes),
            explained=explained,
            num_trials=num_trials,
            num_close_frames=self._num_close_frames,
        )

    def _is_unexplained(self, best: Trial | None, base: Trial) -> bool:
        if best is not None:
            return best.error.mean > EXPLAINED
        return not is_better(base.error, self._mean_action, num_comparisons=1)

    def _best(self, trials: Sequence[Trial], *, than: Trial) -> Trial | None:
        """The lowest error among the trials that explain more than another, by more frames if need be."""
        num_comparisons = len({_answered(trial) for trial in trials})
        ordered = sorted(trials, key=lambda trial: trial.error.mean)
        best = _first(
            ordered, lambda trial: _explains_more(trial, than, self._mean_action, num_comparisons=num_comparisons)
        )
        return best if best is not None else self._best_of_close(ordered, than, num_comparisons)

    def _best_of_close(self, ordered: Sequence[Trial], than: Trial, num_comparisons: int) -> Trial | None:
        gaining = [trial for trial in ordered if trial.error.mean < (1 - LEAST_GAIN) * than.error.mean]
        if self._closer is None or not gaining:
            return None
        chosen = list(dict.fromkeys(map(_answered, gaining)))[:NUM_CLOSE]
        base, mean_action = self._tried(than.alternatives, closer=True), _mean_action(self._closer.frames)
        assert base is not None, "it was tried on fewer frames"

        def explains_more(trial: Trial) -> bool:
            close = self._tried(trial.alternatives, closer=True)
            return close is not None and _explains_more(close, base, mean_action, num_comparisons=num_comparisons)

        best = _first([trial for trial in gaining if _answered(trial) in chosen], explains_more)
        if best is not None:
            self._num_close_frames = len(self._closer.frames.actions)
        return best

    def _extensions(self, single: Trial) -> list[tuple[Alternative, ...]]:
        """An alternative and every other one; in both orders, where both convert actions."""
        (cause,) = single.alternatives
        others = [one for one in self._alternatives if _are_apart(cause, one)]
        both = [] if cause.needs_forward else [(one, cause) for one in others if not one.needs_forward]
        return [(cause, one) for one in others] + both

    def _pairs(self, singles: Sequence[Trial], progress: Callable[[str], None]) -> list[Trial]:
        """Every alternative that needs new answers with every one that converts actions; the best of the first kind
        with one another."""
        forward = [trial for trial in singles if trial.alternatives[0].needs_forward]
        converting = [one for one in self._alternatives if not one.needs_forward]
        pairs = [(*trial.alternatives, one) for trial in forward for one in converting]
        pairs += permutations(converting, 2)  # targets in another order are not the targets of another order
        beams = sorted(forward, key=lambda trial: trial.error.mean)[:NUM_BEAMS]
        for i, trial in enumerate(beams):
            earlier = {id(one.alternatives[0]) for one in beams[: i + 1]}
            pairs += [
                (*trial.alternatives, *other.alternatives)
                for other in forward
                if id(other.alternatives[0]) not in earlier
            ]
        return self._all([(one, other) for one, other in pairs if _are_apart(one, other)], progress)

    def _ordered(self, alternatives: tuple[Alternative, ...]) -> tuple[Alternative, ...]:
        if len(alternatives) < 2:
            return alternatives
        without = {one.change: self._tried(tuple(a for a in alternatives if a is not one)) for one in alternatives}
        return tuple(
            sorted(alternatives, key=lambda one: -(trial.error.mean if (trial := without[one.change]) else 0.0))
        )

    def _all(self, sets: Sequence[tuple[Alternative, ...]], progress: Callable[[str], None]) -> list[Trial]:
        trials = []
        # A single variant of the policy is in memory, so sets with the same options come together; that without any is
        # there already.
        sets = sorted(sets, key=_options_order)
        for number, alternatives in enumerate(sets, start=1):
            progress(f"{number} of {len(sets)}: {' and '.join(one.change for one in alternatives)}")
            if (trial := self._tried(alternatives)) is not None:
                trials.append(trial)
        return trials

    def _tried(self, alternatives: tuple[Alternative, ...], *, closer: bool = False) -> Trial | None:
        answers = self._closer if closer else self._answers
        assert answers is not None, "asked for only if there are such frames"
        predicted, frames = answers.of(alternatives), answers.frames
        if predicted is None:
            return None
        return Trial(
            alternatives=alternatives,
            error=open_loop_error(predicted, frames),
            shrunk=open_loop_error(shrunk(predicted, frames), frames),
            slope=slope(predicted, frames),
        )


def _mean_action(frames: ComparedFrames) -> OpenLoopError:
    return open_loop_error(frames.trivial, frames)


def _answered(trial: Trial) -> tuple[float, ...]:
    """Equal for trials that predict the same, which count once."""
    return tuple(trial.error.by_demonstration.tolist())


def _first(ordered: Sequence[Trial], explains_more: Callable[[Trial], bool]) -> Trial | None:
    """The first trial of which that holds; of those as good, one with options."""
    better: list[Trial] = []
    for trial in ordered:
        if better and not _is_as_good(trial, better[0]):
            break
        if explains_more(trial):
            better.append(trial)
    return min(better, key=lambda trial: not any(one.options for one in trial.alternatives), default=None)


def _explains_more(trial: Trial, than: Trial, mean_action: OpenLoopError, *, num_comparisons: int) -> bool:
    comparisons = [(trial.error, than.error), (trial.shrunk, mean_action)]
    if abs(trial.slope - 1) >= abs(than.slope - 1):
        comparisons.append((trial.error, than.shrunk))
    return all(is_better(one, other, num_comparisons=num_comparisons) for one, other in comparisons)


def _is_as_good(one: Trial, lowest: Trial) -> bool:
    return one.error.mean <= (1 + AS_GOOD) * lowest.error.mean


def _equivalents(explained: Trial, cause: Alternative, trials: Sequence[Trial]) -> tuple[Alternative, ...]:
    """The alternatives that are as good in the place of a cause, one for each other convention. Those that are set in
    the same way are left out, since they tell the user nothing new."""
    rest = {id(one) for one in explained.alternatives} - {id(cause)}
    chosen: dict[str, Alternative] = {}
    for trial in sorted(trials, key=lambda trial: trial.error.mean):
        if not _is_as_good(trial, explained):
            break
        others = [one for one in trial.alternatives if id(one) not in rest]
        if len(others) == 1 and others[0].convention != cause.convention and others[0].setting != cause.setting:
            chosen.setdefault(others[0].convention, others[0])
    return tuple(chosen.values())


def _are_apart(one: Alternative, other: Alternative) -> bool:
    """Whether both can be right together. Two changes of the scale are a third one."""
    return one.convention != other.convention and not {one.convention, other.convention} <= RESCALING


def _options_order(alternatives: Sequence[Alternative]) -> tuple[bool, str]:
    options = {name: value for one in alternatives for name, value in one.options.items()}
    return bool(options), str(sorted(options.items()))


def search(
    answers: Answers,
    alternatives: Sequence[Alternative],
    *,
    closer: ComparedFrames | None = None,
    max_causes: int = 2,
    progress: Callable[[str], None] = lambda text: None,
) -> SearchResult:
    """Args:
    closer: more frames of the same demonstrations.
    max_causes: 1 or 2.
    progress: receives what is tried.
    """
    return _Search(answers, alternatives, closer).run(max_causes, progress)
