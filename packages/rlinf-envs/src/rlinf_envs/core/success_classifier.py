"""SuccessClassifier: names a classifier of pictures whose verdict replaces the reward of an environment."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

Verdict: TypeAlias = "Callable[[Mapping[str, np.ndarray | str]], bool]"
"""Whether the task counts as solved in the observation of one row."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SuccessClassifier:
    """A classifier in a file. Plain values only, so that it can be stored and sent.

    After every action the environment is observed. The reward is 1 if the classifier sees success, else 0, and success
    ends the episode unless terminations are ignored. `EpisodeEnd` has the success of the environment itself, and
    `Moment.reward_components` its reward.
    """

    loader: str
    """Import path of a function `(file, digest) -> Verdict`, which raises EnvError if the file has another digest."""
    file: str
    digest: str
    """SHA-256 of the file, in hexadecimal."""
