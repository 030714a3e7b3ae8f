"""Scores of sampled answers: avg@k, pass@k, maj@k, and their confidence intervals.

One problem is sampled n times. From the n verdicts and answers come three estimates for k <= n, each a number per
problem; their mean over the problems is what a table shows:

avg@k   the expected share of right samples: the mean over all n. k only says how many samples a report is about.
pass@k  the probability that at least one of k samples is right, unbiased (arXiv:2107.03374, equation 1), as the
        product 1 - prod_{i=n-c+1}^{n} (1 - k/i), which stays exact where the binomials overflow.
maj@k   the probability that the answer most often given by k samples is right (arXiv:2203.11171), exact over all
        subsets of size k. Where several answers share the first place each wins with the same probability.

Details that differ between programs: a sample without an answer casts no vote, and k samples without any answer are
wrong; all samples that the checker judged right vote for one answer, however they write it. Samples of one problem are
not independent, so the standard error is computed over problems, which is the clustered one (arXiv:2411.00640,
equations 1 and 4: with equally many samples per problem both are the same).
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import Decimal
from functools import lru_cache
from statistics import NormalDist

import torch
from torch import Tensor

from rlinf_algos.checks import check_finite, check_shape
from rlinf_algos.errors import AlgosError, ShapeError

MAX_VOTES = 1000
"""Samples of one problem in maj@k: binomials of more overflow float64."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """A mean over problems, and how far off it may be.

    Example: 27 of 30 problems solved, one sample each: Estimate(value=0.9, standard_error=0.0557, low=0.744,
    high=0.965, num_problems=30)
    """

    value: float
    standard_error: float
    """Standard error of the mean over problems; NaN for a single problem, which says nothing about others."""
    low: float
    high: float
    """Ends of the confidence interval, within [0, 1]."""
    num_problems: int


def avg_at_k(is_right: Tensor) -> Tensor:
    """The share of right samples of each problem.

    Args:
        is_right: [P, n], bool, or numbers in [0, 1] where a checker gives partial credit.
    Returns:
        [P] float64.
    Raises:
        NonFiniteError, ShapeError (no sample), AlgosError (outside [0, 1]).
    """
    scores = _scores("is_right", is_right, num_dims=2)
    return scores.mean(-1)


def pass_at_k(num_right: Tensor, num_samples: Tensor | int, k: int) -> Tensor:
    """The probability that at least one of k samples is right, unbiased.

    Args:
        num_right: [P] integers, right samples of each problem.
        num_samples: [P] integers, or one for all: samples of each problem.
        k: between 1 and the samples of every problem.
    Returns:
        [P] float64.
    Raises:
        AlgosError: k or a count is out of range; names the problem.

    Example: pass_at_k(tensor([1]), 4, 2) = 1 - C(3, 2) / C(4, 2) = 0.5
    """
    n = torch.as_tensor(num_samples).expand(num_right.shape)
    check_shape("num_samples", n, num_right.shape, "num_right")
    for problem, (c, size) in enumerate(zip(num_right.tolist(), n.tolist(), strict=True)):
        if not (c == int(c) and 0 <= c <= size):
            raise AlgosError(f"num_right[{problem}]={c} must be a whole number between 0 and num_samples={size}")
        _check_k(k, int(size), f"num_samples[{problem}]")
    return torch.tensor(
        [_pass(int(c), int(size), k) for c, size in zip(num_right.tolist(), n.tolist(), strict=True)],
        dtype=torch.float64,
    )


def maj_at_k(answers: Sequence[str | None], is_right: Sequence[bool], k: int) -> float:
    """The probability that the majority of k samples of one problem is right.

    Args:
        answers: one for each sample, compared by `canonical_answer`; None where a completion held none.
        is_right: the checker's verdict on each sample.
        k: between 1 and the number of samples.
    Raises:
        AlgosError: different lengths, k out of range, more than 1000 samples.

    Example: maj_at_k(["4", "4.0", "5", None], [True, True, False, False], 4) = 1.0;
        maj_at_k(["4", "5"], [True, False], 2) = 0.5, for the two answers are tied.
    """
    if len(answers) != len(is_right):
        raise AlgosError(f"{len(answers)} answers, {len(is_right)} verdicts; pass one for each sample")
    _check_k(k, len(answers), "the number of samples")
    if len(answers) > MAX_VOTES:
        raise AlgosError(f"maj@k of {len(answers)} samples; at most {MAX_VOTES}")
    wrong = Counter(
        canonical_answer(answer)
        for answer, right in zip(answers, is_right, strict=True)
        if not right and answer is not None
    )
    return _majority(sum(map(bool, is_right)), tuple(sorted(wrong.values())), len(answers), k)


def canonical_answer(answer: str) -> str:
    """One spelling for the answers that are plainly the same: for counting votes, not for checking.

    Numbers by value (`18.0`, `1,234`, `$5`, `50\\%` without its sign); other text without case, white space, dollar
    signs around it, LaTeX's size and style commands and a full stop at the end.

    Example: "$\\\\left( 1, \\\\dfrac{1}{2} \\\\right)$." -> "(1,\\\\frac{1}{2})"
    """
    text = answer.strip().rstrip(".").strip().strip("$").strip()
    text = re.sub(r"\\(?:left|right|displaystyle|[,;:! ])(?![A-Za-z])", "", text)
    text = re.sub(r"\\[dt]frac\b", r"\\frac", text)
    text = re.sub(r"\\(?:text|mathrm|textbf|mathbf)\s*\{([^{}]*)\}", r"\1", text)
    text = re.sub(r"\s+", "", text).removesuffix("%").removesuffix("\\")
    if re.fullmatch(r"[-+]?\\?\$?(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)?(?:\.[0-9]+)?", text) and re.search("[0-9]", text):
        return _plain_number(Decimal(re.sub(r"[,$\\]", "", text)))
    return text.casefold()


def mean_over_problems(scores: Tensor) -> Estimate:
    """The mean of one number per problem, with its clustered standard error and a 95 % confidence interval.

    The interval is Wilson's (1927) for as many independent problems as would have the same standard error,
    p (1 - p) / se^2, as survey statistics does for clustered samples (Korn and Graubard 1998). Where all problems score
    0, or all 1, that number is the number of problems: 0 of 30 is not "0 +- 0", its interval ends at 11 %.

    Args:
        scores: [P] in [0, 1], avg@k, pass@k or maj@k of each problem.
    Raises:
        ShapeError (no problem), NonFiniteError, AlgosError (outside [0, 1]).
    """
    values = _scores("scores", scores, num_dims=1)
    size = len(values)
    mean = min(1.0, max(0.0, float(values.mean())))
    error = float(values.std(unbiased=True)) / math.sqrt(size) if size > 1 else math.nan
    spread = mean * (1 - mean)
    share = error**2 / spread if error > 0 and spread > 0 else 1 / size  # of a problem in as many that are independent
    z = NormalDist().inv_cdf(0.975)
    center = (mean + z * z * share / 2) / (1 + z * z * share)
    half = z / (1 + z * z * share) * math.sqrt(spread * share + (z * share / 2) ** 2)
    return Estimate(
        value=mean,
        standard_error=error,
        low=min(mean, max(0.0, center - half)),
        high=max(mean, min(1.0, center + half)),
        num_problems=size,
    )


def _plain_number(number: Decimal) -> str:
    digits = f"{number:f}"
    digits = digits.rstrip("0").rstrip(".") if "." in digits else digits
    return "0" if number == 0 else digits


def _pass(num_right: int, num_samples: int, k: int) -> float:
    if num_samples - num_right < k:
        return 1.0
    factors = [1.0 - k / i for i in range(num_samples - num_right + 1, num_samples + 1)]
    return 1.0 - math.prod(factors)


@lru_cache(maxsize=4096)
def _majority(num_right: int, wrong: tuple[int, ...], num_samples: int, k: int) -> float:
    """Counts the subsets of k samples by how often the right answer comes (j), and sums the share of the win.

    Args:
        wrong: how often each wrong answer was given.
    """
    num_silent = num_samples - num_right - sum(wrong)
    total = 0.0
    for j in range(1, min(num_right, k) + 1):
        ways = _ways_without_a_greater(wrong, j, k - j)
        rest = torch.tensor([_choose(num_silent, k - j - used) for used in range(k - j + 1)], dtype=torch.float64)
        shares = 1.0 / (1.0 + torch.arange(len(ways), dtype=torch.float64))
        total += _choose(num_right, j) * float((shares[:, None] * ways * rest).sum())
    return min(1.0, total / _choose(num_samples, k))


def _ways_without_a_greater(wrong: tuple[int, ...], j: int, limit: int) -> Tensor:
    """[tied, used]: in how many ways `used` <= limit samples can be taken of the wrong answers so that none is taken
    more than j times and `tied` of them exactly j times."""
    most_tied = min(limit // j, sum(count >= j for count in wrong))
    ways = torch.zeros(most_tied + 1, limit + 1, dtype=torch.float64)
    ways[0, 0] = 1.0
    for count in wrong:
        after = torch.zeros_like(ways)
        for taken in range(min(count, j, limit) + 1):
            moved = ways[:, : limit + 1 - taken] * _choose(count, taken)
            if taken < j:
                after[:, taken:] += moved
            else:
                after[1:, taken:] += moved[:-1]
        ways = after
    return ways


@lru_cache(maxsize=65536)
def _choose(n: int, k: int) -> float:
    return float(math.comb(n, k)) if k >= 0 else 0.0


def _check_k(k: int, num_samples: int, what: str) -> None:
    if not 1 <= k <= num_samples:
        raise AlgosError(f"k={k} must be between 1 and {what}={num_samples}; draw more samples or ask for a smaller k")


def _scores(name: str, scores: Tensor, *, num_dims: int) -> Tensor:
    values = scores.to(torch.float64)
    if values.dim() != num_dims or values.numel() == 0:
        expected = "[P]" if num_dims == 1 else "[P, n]"
        raise ShapeError(f"{name} has shape {list(values.shape)}; it must be {expected}, with at least one element")
    check_finite(name, values)
    bad = ((values < 0) | (values > 1)).nonzero()
    if len(bad):
        index = tuple(bad[0].tolist())
        raise AlgosError(f"{name}[{', '.join(map(str, index))}]={values[index].item()}; scores are between 0 and 1")
    return values
