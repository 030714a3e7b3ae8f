"""The package's errors. All are `ValueError` too: each is something a user can correct in a flow, plan or config."""

import difflib
from collections.abc import Iterable


class SchedError(ValueError):
    """Anything rlinf-sched refuses."""


class FlowError(SchedError):
    """A flow graph that cannot run: duplicate names, a channel without a writer or reader, an impossible cycle."""


class ClusterError(SchedError):
    """An inconsistent device list."""


class ProfileError(SchedError):
    """Profiles that are invalid, or do not fit their flow."""


class ProblemError(SchedError):
    """An inconsistent planning problem, or an unreadable problem file."""


class InfeasibleError(SchedError):
    """No plan fits; the message names the stage, the shortage, and the smallest change that would make it fit."""


class PlanError(SchedError):
    """A plan that does not fit its flow or its cluster, or plan JSON that cannot be read."""


def did_you_mean(word: str, allowed: Iterable[str]) -> str:
    """Returns `; did you mean 'x'?`, or the allowed values if nothing is close (`; allowed: a, b`)."""
    choices = list(allowed)
    close = difflib.get_close_matches(word, choices, n=1)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; allowed: {', '.join(choices) or 'nothing'}"


def raise_problems(error: type[SchedError], subject: str, problems: Iterable[str], *, prefix: str = "") -> None:
    """Raises `error` with every problem, so that a user can correct all at once; returns if there is none.

    One problem is reported as `prefix` and its text, several as a list under `subject`.
    """
    texts = list(problems)
    if len(texts) == 1:
        raise error(prefix + texts[0])
    if texts:
        raise error(f"{subject} has {len(texts)} mistakes:\n  - " + "\n  - ".join(texts))
