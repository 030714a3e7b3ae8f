"""Lengths of completions: a lognormal distribution of tokens with a limit, and the resulting costs of groups of
completions of one prompt. Completions of a group are assumed independent; in reality those of a hard prompt are all
long, so groups differ more and hide less of the tail than here.
"""

from dataclasses import dataclass

import numpy as np

from rlinf_sched.errors import ProfileError
from rlinf_sched.profile import ItemCosts

LENGTH_SIGMA = 0.75
"""Standard deviation of the logarithm of an answer's length: the longest in a thousand is ten times the median
(ln 10 / 3.09), the tail that RLHFuse reports for public chat models (arXiv:2409.13221, section 2)."""
MEAN_SHARE_OF_LIMIT = 0.25
"""Mean length of an answer as a share of the limit, where it is not measured. An assumption: DeepScaleR's distilled
1.5B model starts at 5,500 tokens, and its answers to AIME have around 10,000, at limits of 24k to 32k."""
_NUM_QUANTILES = 128


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Tokens of prompts and answers, and how many answers a prompt gets: an item is one prompt's group.

    Example: eight answers to a prompt, 7,168 tokens in the mean and never above 27,648:
        Lengths(mean_tokens=7168, limit_tokens=27648, group_size=8)
    """

    mean_tokens: float
    """Mean tokens of an answer, after the limit is applied."""
    limit_tokens: int
    prompt_tokens: int = 256
    """Mean tokens of a prompt; a problem of mathematics has 100 to 400."""
    group_size: int = 1
    sigma: float = LENGTH_SIGMA
    num_turns: float = 1.0
    """Mean turns of an answer that is an episode: a conversation with tools."""
    sampled_share: float = 1.0
    """Share of an answer's tokens that are sampled; the others come from tools, and are read."""
    reads_cache: bool = True
    """Whether the engine keeps a conversation's keys and values from turn to turn; otherwise each turn computes it
    anew."""
    outside_s: float = 0.0
    """Mean seconds of an episode outside the engine, in tools."""

    def __post_init__(self) -> None:
        if not 1 <= self.mean_tokens <= self.limit_tokens:
            raise ProfileError(f"mean_tokens={self.mean_tokens} must be from 1 to limit_tokens={self.limit_tokens}")
        if self.group_size < 1 or self.prompt_tokens < 0:
            raise ProfileError(
                f"group_size={self.group_size}, prompt_tokens={self.prompt_tokens}: use at least 1 and 0"
            )
        if self.num_turns < 1 or self.outside_s < 0 or not 0 < self.sampled_share <= 1:
            raise ProfileError(
                f"num_turns={self.num_turns}, outside_s={self.outside_s}, sampled_share={self.sampled_share}: use at "
                "least 1 and 0, and a share above 0 and up to 1"
            )
        if not 0 <= self.sigma <= 5:
            raise ProfileError(f"sigma={self.sigma} must be from 0 to 5")

    @property
    def mean_context_tokens(self) -> float:
        """Mean number of tokens that a token of an answer attends to: the prompt and half of its own answer.

        Longer answers count for more, as they have more tokens.
        """
        lengths = self._quantiles(1)
        return self.prompt_tokens + float((lengths**2).mean() / lengths.mean()) / 2

    @property
    def longest_of_group_tokens(self) -> float:
        """Expected longest answer of a group: how long the group stays in the engine."""
        return float(self._quantiles(self.group_size).mean())

    @property
    def longest_sampled_tokens(self) -> float:
        """Those of them that are sampled, one after the other."""
        return self.sampled_share * self.longest_of_group_tokens

    @property
    def longest_outside_s(self) -> float:
        """Expected seconds outside the engine of the longest episode of a group: longer ones have more turns."""
        return self.outside_s * self.longest_of_group_tokens / self.mean_tokens

    @property
    def read_tokens(self) -> float:
        """Tokens of a group that an engine reads: its prompt once, what tools wrote, and where it keeps no cache every
        conversation so far at each later turn."""
        again = 0.0 if self.reads_cache else (self.num_turns - 1) * (self.prompt_tokens + self.mean_tokens / 2)
        return self.prompt_tokens + self.group_size * (again + (1 - self.sampled_share) * self.mean_tokens)

    @property
    def group_tokens(self) -> float:
        """Tokens of a whole group, prompts repeated as they are in training."""
        return self.group_size * (self.prompt_tokens + self.mean_tokens)

    @property
    def packed_group_tokens(self) -> float:
        """Tokens of a whole group whose prompt is computed once."""
        return self.prompt_tokens + self.group_size * self.mean_tokens

    @property
    def longest_costs(self) -> ItemCosts:
        """How groups spread in generation: by their longest answer."""
        if self.sigma == 0:
            return ItemCosts()
        lengths = self._quantiles(self.group_size)
        return ItemCosts(spread="samples", samples=tuple(np.round(lengths / lengths.mean(), 4).tolist()))

    @property
    def total_costs(self) -> ItemCosts:
        """How groups spread in training: by the sum of their tokens, lognormal with the variance of the sum."""
        if self.sigma == 0:
            return ItemCosts()
        lengths = self._quantiles(1) + self.prompt_tokens
        variance = float((lengths / lengths.mean()).var()) / self.group_size
        longest = (self.prompt_tokens + self.limit_tokens) / (self.prompt_tokens + self.mean_tokens)
        return ItemCosts(spread="lognormal", sigma=round(float(np.sqrt(np.log1p(variance))), 4), longest=longest)

    def _quantiles(self, largest_of: int) -> np.ndarray:
        """float64 [_NUM_QUANTILES]: tokens of the longest of so many answers, the single answer's mean kept."""
        single = ItemCosts(spread="lognormal", sigma=self.sigma, longest=self.limit_tokens / self.mean_tokens)
        # fine enough that the k-th root still meets the limit's corner
        costs = single.quantiles(64 * _NUM_QUANTILES)
        shares = ((np.arange(_NUM_QUANTILES) + 0.5) / _NUM_QUANTILES) ** (1 / largest_of)
        at = np.minimum((shares * len(costs)).astype(int), len(costs) - 1)
        return np.minimum(costs[at] * self.mean_tokens, self.limit_tokens)
