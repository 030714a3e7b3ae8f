"""An off-policy algorithm as plain data: soft actor-critic and its variants, which learn from a replay buffer.

`off_policy_preset("rlpd", batch_size=512)` returns a named one with a change. Every name has the same fields and the
same code; RLPD (arXiv:2302.02948) is SAC with demonstrations in each batch, ten critics with layer norm and twenty
critic updates for each environment step. Needs no torch, like `Algorithm`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Literal

from rlinf_algos.algorithm import AlgorithmError
from rlinf_algos.errors import AlgosError
from rlinf_algos.presets import OFF_POLICY_PRESETS
from rlinf_algos.registry import did_you_mean


@dataclass(frozen=True, kw_only=True, slots=True)
class OffPolicyAlgorithm:
    """How stored transitions become updates. A transition is one answer of the policy: an action, or a chunk of them.

    Example: off_policy_preset("sac") == OffPolicyAlgorithm()
    """

    __pydantic_config__: ClassVar = {
        "extra": "forbid",
        "strict": True,
        "allow_inf_nan": False,
        "use_attribute_docstrings": True,
    }
    """As `Algorithm.__pydantic_config__`."""

    name: Literal["sac", "rlpd"] = "sac"
    """sac: soft actor-critic; rlpd: the same with demonstrations in each batch and an ensemble of critics. The name
    chooses the other fields' defaults."""
    gamma: float = 0.99
    """Discount factor per transition; in [0, 1]."""
    update_ratio: float = 1.0
    """Updates of the critics per transition collected, also called replay ratio or update-to-data ratio."""
    policy_delay: int = 1
    """Updates of the critics per update of policy and temperature. RLPD: as many as update_ratio."""
    batch_size: int = 256
    """Transitions of an update, those from demonstrations included; a multiple of actor.num_shards."""
    buffer_size: int = 1_000_000
    """Transitions that the replay buffer holds, over all shards; the oldest are overwritten."""
    num_random: int = 1_000
    """Transitions collected with uniformly random actions at the start of the run, before the policy acts, so that the
    critics see the range of actions; rounded up to whole training steps."""
    num_critics: int = 2
    """Critics of the ensemble; each has a target critic."""
    num_target_critics: int = 2
    """Critics of which targets take the minimum; a random subset is drawn for each update if there are more (REDQ)."""
    policy_value: Literal["min", "mean"] = "min"
    """The value that the policy maximizes: the minimum (SAC) or the mean (REDQ, RLPD) over all critics."""
    critic_layer_norm: bool = False
    """Layer norm in the critics' hidden layers, which bounds their values outside the data (RLPD)."""
    target_rate: float = 0.005
    """Share by which target critics move towards the critics after each update; papers call it tau."""
    backup_entropy: bool = True
    """Count the policy's entropy in the targets of the critics. false: critics predict rewards alone."""
    initial_temperature: float = 1.0
    """Weight of the entropy before the first update."""
    target_entropy: float | None = -1.0
    """Entropy that the temperature is adapted to, in nats per number of an action scaled to -1..1. null: the
    temperature stays at initial_temperature."""
    demonstration_fraction: float = 0.0
    """Share of each batch that is drawn from the section demonstrations instead of the replay buffer."""
    picture_shift: int = 4
    """Pixels by which pictures of a batch are shifted at random in each direction, their border repeated (DrQ,
    arXiv:2004.13649); 0: pictures as observed."""
    max_staleness: int = 0
    """Training steps by which the weights that act may be older than those that train, so that simulation runs ahead of
    training. 0: the steps do not overlap."""

    def __post_init__(self) -> None:
        errors = list(off_policy_problems(asdict(self)))
        if errors:
            raise AlgorithmError(errors)

    def num_updates(self, num_transitions: int) -> int:
        """Updates of the critics after that many new transitions."""
        return round(self.update_ratio * num_transitions)

    @property
    def num_demonstrated(self) -> int:
        """Transitions of a batch that are drawn from demonstrations."""
        return round(self.demonstration_fraction * self.batch_size)


_RANGES: dict[str, tuple[float, float, str]] = {
    "gamma": (0.0, 1.0, "it is a discount"),
    "policy_delay": (1, math.inf, "it counts updates"),
    "batch_size": (1, math.inf, "an update needs a transition"),
    "buffer_size": (1, math.inf, "it counts transitions"),
    "num_random": (0, math.inf, "it counts transitions"),
    "num_critics": (1, math.inf, "the policy needs a value"),
    "num_target_critics": (1, math.inf, "targets need a value"),
    "demonstration_fraction": (0.0, 1.0, "it is a share"),
    "picture_shift": (0, math.inf, "it counts pixels"),
    "max_staleness": (0, 8, "as for other algorithms"),
}


def off_policy_preset(name: str, **changes: Any) -> OffPolicyAlgorithm:
    """The algorithm of that name, with changes.

    Raises: AlgosError that lists what is wrong: the name, a field that is unknown or out of range.
    """
    names = [field.name for field in fields(OffPolicyAlgorithm)]
    if unknown := [change for change in changes if change not in names]:
        raise AlgosError(f"{unknown[0]!r} is no field of an algorithm; {did_you_mean(unknown[0], names)}")
    return OffPolicyAlgorithm(**filled_off_policy(name, changes))


def filled_off_policy(name: str, changes: Mapping[str, Any]) -> dict[str, Any]:
    """The changes, and the preset's fields that they leave out. Raises: AlgosError for an unknown name."""
    if name not in OFF_POLICY_PRESETS:
        raise AlgosError(f"no algorithm is called {name!r}; {did_you_mean(name, OFF_POLICY_PRESETS)}")
    return {**OFF_POLICY_PRESETS[name], **changes, "name": name}


def off_policy_problems(values: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """What is wrong with the fields, as (field, what follows its name in a message)."""
    for name, (low, high, why) in _RANGES.items():
        if not low <= values[name] <= high:
            allowed = f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"
            yield name, f"={values[name]} must be {allowed}: {why}"
    for name, why in (
        ("update_ratio", "it is a ratio of counts"),
        ("target_rate", "it is the share by which targets move"),
        ("initial_temperature", "it is the exponential of a parameter"),
    ):
        if not 0 < values[name] < math.inf:
            yield name, f"={values[name]} must be above 0 and finite: {why}"
    if values["target_rate"] > 1:
        yield "target_rate", f"={values['target_rate']} must be at most 1: it is the share by which targets move"
    if values["num_target_critics"] > values["num_critics"]:
        yield (
            "num_target_critics",
            f"={values['num_target_critics']} is more than num_critics={values['num_critics']}",
        )
    if values["policy_value"] not in ("min", "mean"):
        yield "policy_value", f"={values['policy_value']} is not known; use min or mean"
