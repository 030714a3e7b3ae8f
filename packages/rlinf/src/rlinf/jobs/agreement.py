"""Whether engine and trainer agree about the sampled tokens as far as rounding lets them.

What the engine and the trainer say of a token differs by rounding alone while both hold the same weights. A layer
rounds an activation about 12 times, and errors of either sign add up as a random walk: after L layers with the unit
roundoff u the relative error is about sqrt(12 L) u, and that of a log-probability this times the spread of the logits,
about 2.3 nats (ln 10) in a language model. So its root mean square is about 8 sqrt(L) u, and the KL half its square.
Sums of K products are rounded in float32 in any case; where that is the type itself, this counts too, as a random walk
of K / 32 steps in each of the lanes that a kernel has at least. The models of `test_rlinf_agreement.py` stay below half
of it.

An engine with weights in FP8 computes another model: the roundoff of e4m3 is 2^-4, and weights whose leading digits are
spread evenly on a logarithmic scale are 2.65 % off in the root mean square, as is a product with them. A layer has up
to 7 such matrices on the way of a token, and the walk is the same. This bound is wide. `rlinf check` therefore has the
trainer score the tokens with the rounded weights, too, so that the usual bound holds for the rest.

Experts add to it: a router that is within rounding of a tie takes another expert, and the token's log-probability
moves by about 0.1 nats. Where that is less than one token in a thousand, as in float32, such a token outweighs all the
others' KL, and the 99.9 % quantile of the distances may speak for them; else the KL may be larger by what they add.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-9}
AMPLIFICATION = 8.0
"""Of the unit roundoff, for each square root of a layer; see above."""
SPREAD = 2.3
"""Nats, of the logits in a language model."""
FP8_ERROR = 2.0**-4 / math.sqrt(3) * math.sqrt(3 / (8 * math.log(2)))
"""Root mean square of the relative error of a weight in e4m3: uniform within its rounding, over mantissas m in [1, 2)
whose logarithm is uniform, so that the mean of 1 / m^2 is 3 / (8 ln 2)."""
FP8_MATRICES = 7.0
"""Linear layers of a layer of a transformer: q, k, v, o, gate, up and down."""
ROUNDINGS = 12.0
"""Of an activation in a layer."""
LANES = 32
"""Partial sums that a matrix product has at least."""
TIES = 10.0
"""Share of the tokens whose router is near a tie in a layer, for each unit of relative error."""
RARE = 1e-3
"""Share of the tokens below which a quantile leaves those out that went to another expert."""
REROUTED_KL = 0.1**2 / 2
"""Nats that a token adds where it goes to another expert."""
TAIL = 4.0
"""The 99.9 % quantile of a normal distribution is 3.3 times its deviation."""

SUSPECTS = (
    "version: the engine serves other weights than the trainer has; rlinf check says whether a sync arrives",
    "temperature: log-probabilities are not those at rollout.temperature, or of a cut distribution (top-p, top-k)",
    "tokenizer: the prompt that the engine saw is another one: a second begin token, a template applied twice, a "
    "prompt that was cut",
    "dtype: one of the two computes in a coarser type than the config says: TF32, a quantized or half-precision engine",
)
ROUTING = "MoE routing: the engine takes other experts: their order, the router's type, or a load balancer"


@dataclass(frozen=True, kw_only=True, slots=True)
class Arithmetic:
    """What both sides compute with."""

    trained_dtype: str
    served_dtype: str
    num_layers: int
    width: int
    """Terms of the longest sum: the wider of hidden and intermediate size."""
    has_experts: bool
    temperature: float
    quantization: str | None = None
    """Of the served weights; None: they are those of the trainer, or it scores with weights that are quantized, too."""

    quantizes_activations: bool = False
    """The engine rounds what its FP8 weights are multiplied with to FP8, too."""

    @property
    def unit_roundoff(self) -> float:
        """Of both sides together."""
        return math.hypot(self._roundoff(self.trained_dtype), self._roundoff(self.served_dtype))

    def _roundoff(self, dtype: str) -> float:
        steps = self.width / LANES if dtype == "float32" else 0.0
        return UNIT_ROUNDOFF[dtype] * math.sqrt(1.0 + steps)

    @property
    def rms_bound(self) -> float:
        """Nats, root mean square of the distance that rounding explains, without experts."""
        rounding = AMPLIFICATION * math.sqrt(self.num_layers) * self.unit_roundoff
        return math.hypot(rounding, SPREAD * self._quantization_error) / min(1.0, self.temperature)

    @property
    def kl_bound(self) -> float:
        """Nats a token that rounding explains."""
        bound = self.rms_bound**2 / 2
        return bound + (REROUTED_KL * self.rerouted_share if self.rerouted_share > RARE else 0.0)

    @property
    def rerouted_share(self) -> float:
        """Of the tokens, those that rounding sends to another expert somewhere."""
        error = math.hypot(math.sqrt(ROUNDINGS * self.num_layers) * self.unit_roundoff, self._quantization_error)
        return min(1.0, TIES * self.num_layers * error) if self.has_experts else 0.0

    @property
    def _quantization_error(self) -> float:
        """Relative, of what the last layer computes, by the rounding to FP8."""
        num_rounded = (self.quantization is not None) + self.quantizes_activations
        return FP8_ERROR * math.sqrt(num_rounded * FP8_MATRICES * self.num_layers)

    def __str__(self) -> str:
        experts = " with experts" if self.has_experts else ""
        weights = f" with weights in {self.quantization}" if self.quantization else ""
        served = f"served in {self.served_dtype}{weights}"
        return f"trained in {self.trained_dtype}, {served}, {self.num_layers} layers{experts}"


@dataclass(frozen=True, kw_only=True, slots=True)
class MismatchVerdict:
    """The verdict on the tokens of a step."""

    agrees: bool
    kl: float
    """Nats a token, estimate k3."""
    kl_bound: float
    """Nats a token that rounding explains."""
    p999: float
    """Nats, 99.9 % quantile of the distances."""
    largest: float
    """Nats."""
    arithmetic: Arithmetic

    @property
    def summary(self) -> str:
        """One line."""
        verdict = "agree" if self.agrees else "do NOT agree"
        explains = "rounding explains" if self.agrees else "rounding explains at most"
        return (
            f"engine and trainer {verdict} about the sampled tokens: KL {self.kl:.2g} nats a token, {explains} "
            f"{self.kl_bound:.2g} ({self.arithmetic}); 99.9 % of the tokens within {self.p999:.2g} nats, the worst "
            f"{self.largest:.2g}"
        )

    @property
    def suspects(self) -> Sequence[str]:
        """What to look at, the likeliest first; empty where they agree."""
        if self.agrees:
            return ()
        return (*SUSPECTS, ROUTING) if self.arithmetic.has_experts else SUSPECTS

    @property
    def text(self) -> str:
        """The summary, and below it the suspects."""
        lines = [f"  {number}. {suspect}" for number, suspect in enumerate(self.suspects, 1)]
        return "\n".join([self.summary, *(["usual suspects, in this order:"] if lines else []), *lines])

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "summary": self.summary, "suspects": list(self.suspects)}


def judge(arithmetic: Arithmetic, *, kl: float, p999: float, largest: float) -> MismatchVerdict:
    """The verdict on a step. What is not a number agrees with nothing."""
    agrees = kl <= arithmetic.kl_bound
    if 0 < arithmetic.rerouted_share <= RARE:
        agrees = agrees or p999 <= TAIL * arithmetic.rms_bound
    return MismatchVerdict(
        agrees=agrees, kl=kl, kl_bound=arithmetic.kl_bound, p999=p999, largest=largest, arithmetic=arithmetic
    )


def judge_step(arithmetic: Arithmetic, metrics: Mapping[str, float], prefix: str = "") -> MismatchVerdict | None:
    """The verdict on a training step by its metrics; None: it trained on no token.

    Args:
        prefix: of the metrics of the policy, see `rlinf.glossary.policy_prefix`.
    """
    at = f"{prefix}rollout/logprob_gap"
    kl = metrics.get(f"{at}_kl")
    if kl is None:
        return None
    return judge(arithmetic, kl=kl, p999=metrics[f"{at}_p999"], largest=metrics[f"{at}_max"])


def arithmetic_of(
    model: Mapping[str, Any],
    *,
    trained_dtype: str,
    served_dtype: str,
    temperature: float,
    quantization: str | None = None,
    quantizes_activations: bool = False,
) -> Arithmetic:
    """Args:
    model: its config.json.
    quantization: of the served weights.
    quantizes_activations: whether the engine then quantizes activations, too.
    """
    experts = ("num_experts", "num_local_experts", "n_routed_experts")
    decoder = model.get("text_config") or model  # models that read pictures have one
    return Arithmetic(
        trained_dtype=trained_dtype,
        served_dtype=served_dtype,
        num_layers=int(decoder.get("num_hidden_layers", 1)),
        width=max(int(decoder.get("hidden_size", 1)), int(decoder.get("intermediate_size") or 1)),
        has_experts=any((decoder.get(name) or 0) > 1 for name in experts),
        temperature=temperature,
        quantization=quantization,
        quantizes_activations=quantization is not None and quantizes_activations,
    )
