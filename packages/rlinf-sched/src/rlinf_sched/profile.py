"""Profiles: the time and memory of a stage as a function of parallelism and items. Plain data, JSON.

A stage runs in *instances* (ranks), each spanning the devices of one parallelism (tensor times pipeline parallel). An
instance processes hand-overs of items. The time of a hand-over is a table of points, and how costs of unequal items
combine is the stage's *batching*.
"""

import bisect
import functools
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any, Literal, get_args

import numpy as np

from rlinf_sched import strict_json
from rlinf_sched.cluster import MAX_CORES
from rlinf_sched.errors import ProfileError, did_you_mean

FORMAT_VERSION = 1
MAX_SECONDS = 1e12
"""Maximum seconds of any profiled quantity: 32,000 years. Multiplied by all items, rounds and devices of a step it is
far below the float64 limit."""
Batching = Literal["sum", "longest", "continuous"]
Spread = Literal["equal", "lognormal", "samples"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TimePoint:
    """`num_items` items of mean cost in one hand-over (continuous batching: concurrently in the engine) take
    `seconds`."""

    num_items: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class ItemCosts:
    """The distribution of item costs around their mean, which counts as 1.

    Example: generation lengths with a long tail, one in a thousand nine times the mean:
        ItemCosts(spread="lognormal", sigma=0.8)
    """

    spread: Spread = "equal"
    sigma: float = 0.0
    """Standard deviation of the logarithm of the costs, for a lognormal spread; the mean stays 1."""
    samples: tuple[float, ...] = ()
    """Measured costs in any unit, for a spread of samples; they are scaled to mean 1."""
    longest: float | None = None
    """No item costs more than this multiple of the mean before clipping (a limit on generated tokens)."""

    def quantiles(self, num_items: int) -> np.ndarray:
        """float64 [num_items], ascending: the costs at the middles of `num_items` equal shares, scaled to mean 1."""
        shares = (np.arange(num_items) + 0.5) / num_items
        costs = self._inverse(shares)
        return costs / costs.mean()

    def typical(self, num_items: int) -> np.ndarray:
        """float64 [num_items], read-only: the quantiles in a fixed shuffled order, as items arrive; plans are made for
        these costs."""
        return _typical(self, num_items)

    def draw(self, num_items: int, seed: int, step: int = 0) -> np.ndarray:
        """float64 [num_items]: costs drawn at random, with mean 1 in expectation; the same for the same seed and step,
        and no two of these share draws."""
        shares = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(step,))).random(num_items)
        return self._inverse(shares) / self._mean()

    def _inverse(self, shares: np.ndarray) -> np.ndarray:
        if self.spread == "lognormal":
            costs = np.exp(self.sigma * _normal_quantiles(shares) - self.sigma**2 / 2)
        elif self.spread == "samples":
            ordered = np.sort(np.asarray(self.samples, dtype=np.float64))
            costs = ordered[np.minimum((shares * len(ordered)).astype(int), len(ordered) - 1)] / ordered.mean()
        else:
            costs = np.ones_like(shares)
        return costs if self.longest is None else np.minimum(costs, self.longest)

    def _mean(self) -> float:
        return float(self._inverse((np.arange(4096) + 0.5) / 4096).mean())


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceProfile:
    """The profile of a stage with one parallelism."""

    num_devices: int = 1
    """Devices that one instance spans. 0: the instance runs on the host and holds no device."""
    num_ranks: int = 0
    """Instances that ran concurrently when it was measured. A parallelism measured at several numbers is listed once
    for each, and a plan uses the nearest (`StageProfile.serves`). 0: the times hold for any number."""
    device_name: str = ""
    """Product it was measured on or derived for (`Device.name`). Empty: any device the cluster places stages on."""
    points: tuple[TimePoint, ...]
    """Measured or derived times. Ascending in items. Between two points the time is linear; below the first it follows
    the line through the first two, but is at least proportional to the items (with one point: just that); above the
    last the slope of the last two goes on, and the planner warns."""
    max_items: int = 0
    """Maximum items in one hand-over (continuous batching: concurrently in the engine). 0: memory is the only limit."""
    step_s: float = 0.0
    """Seconds that each instance takes once per step, after its last item (gradient reduction, optimizer)."""
    state_bytes: int = 0
    """Bytes on each device while the stage's state is on it: weights, gradients, environment instances."""
    sharded_state_bytes: int = 0
    """Bytes divided evenly over all devices of the stage: what FSDP or a distributed optimizer shards over ranks."""
    work_bytes: int = 0
    """Further bytes on each device while it computes, whatever the number of items."""
    item_work_bytes: int = 0
    """Further bytes on each device for each item in the hand-over: activations, KV cache."""
    onload_s: float | None = None
    """Seconds to onload the state of a device from host memory. None: its bytes over the host link's rate."""
    offload_s: float | None = None
    """Seconds to offload the state to host memory. None: its bytes over the host link's rate."""

    def fits_like(self, other: "InstanceProfile") -> bool:
        """Whether both span the same number of devices of the same product."""
        return (self.num_devices, self.device_name) == (other.num_devices, other.device_name)

    def seconds(self, num_items: float) -> float:
        """Seconds of a hand-over of `num_items` items of mean cost; 0 for no items."""
        if num_items <= 0:
            return 0.0
        items, times = [point.num_items for point in self.points], [point.seconds for point in self.points]
        if len(items) == 1:
            return times[0] * num_items / items[0]
        upper = min(max(bisect.bisect_left(items, num_items), 1), len(items) - 1)
        slope = (times[upper] - times[upper - 1]) / (items[upper] - items[upper - 1])
        if num_items > items[-1]:
            slope = max(slope, 0.0)
        line = times[upper] + slope * (num_items - items[upper])
        return max(line, times[0] * num_items / items[0]) if num_items < items[0] else line

    def resident_bytes(self, num_devices: int) -> int:
        """Bytes on each of the stage's `num_devices` devices between its turns, when it does not offload."""
        return self.state_bytes + -(-self.sharded_state_bytes // max(num_devices, 1))

    def extra_bytes(self, num_items: int) -> int:
        """Bytes besides the state on each of its devices while it computes on this many items at once."""
        return self.work_bytes + self.item_work_bytes * num_items


@dataclass(frozen=True, kw_only=True, slots=True)
class StageProfile:
    """The profile of one stage."""

    instances: tuple[InstanceProfile, ...]
    """The supported parallelisms of the stage, each with a different `num_devices`."""
    batching: Batching = "sum"
    """How unequal items add up in a hand-over of n items with costs c and the table T.
    sum: T(n) times the mean of c (training: tokens add up).
    longest: T(n) times the largest c (a static batch generates until its longest answer ends).
    continuous: each item in the engine advances at 1 / T(items in it) and leaves once it has done its c."""
    costs: ItemCosts = field(default_factory=ItemCosts)
    rounds: int = 1
    """Number of passes of each item through the stage per step: 1 outside cycles. The stages of a cycle (environment
    steps of an episode, turns of a conversation) all have the same number."""
    max_instances: int = 0
    """Maximum number of instances of the stage (environment processes). 0: no limit."""
    cores: float | None = None
    """Cores of its node that an instance keeps busy while it computes, per device; if the cluster specifies cores,
    processes that need more than there are slow each other down. None: 1 on the host and on a CPU slot, 0 on a GPU."""
    weights_bytes: int = 0
    """Bytes that a weight sync moves, over all ranks; for the groups at either end of a weight edge."""
    source: str = ""
    """Origin of the numbers: "measured on ...", "derived from ...", with date and versions."""

    def serving(self, like: InstanceProfile, num_ranks: int) -> InstanceProfile | None:
        """The entry for this many devices of the same product that `serves` this many instances; None: there is
        none."""
        return next((one for one, most in self._reaches(like) if num_ranks * num_ranks <= most), None)

    def serves(self, instance: InstanceProfile, num_ranks: Any) -> Any:
        """Whether this entry applies to this many instances: no other entry for the same devices has a number of
        instances that is nearer by ratio. `num_ranks` is an int or an array."""
        least = -1.0
        for one, most in self._reaches(instance):
            if one.num_ranks == instance.num_ranks:
                return (num_ranks * num_ranks > least) & (num_ranks * num_ranks <= most)
            least = most
        raise AssertionError(f"{instance} is none of the profile's choices")

    def _reaches(self, like: InstanceProfile) -> list[tuple[InstanceProfile, float]]:
        """The entries for the same number of devices of the same product, ascending in instances, each with the square
        of the largest number it serves: the geometric mean with the next one."""
        alike = sorted((one for one in self.instances if one.fits_like(like)), key=lambda one: one.num_ranks)
        most = [float(one.num_ranks * more.num_ranks) for one, more in itertools.pairwise(alike)]
        return list(zip(alike, [*most, math.inf], strict=False))


@dataclass(frozen=True, kw_only=True, slots=True)
class Profiles:
    """Profiles of all stages of a flow, by stage name."""

    stages: Mapping[str, StageProfile]

    def to_json(self) -> str:
        """The profiles as versioned JSON text with sorted keys; equal profiles give equal text."""
        return strict_json.dump(self, format_version=FORMAT_VERSION)

    @classmethod
    def from_json(cls, text: str) -> "Profiles":
        """Reads what `to_json` wrote, or a person; does not call `problems`.

        Raises:
            ProfileError: malformed JSON, unknown or missing keys, wrong types; names the place.
        """
        return strict_json.load(text, cls, root="profiles", format_version=FORMAT_VERSION, error=ProfileError)

    def problems(self) -> Iterator[str]:
        """Every invalid number, as `profiles.stages.<stage>.<key>=...` and the allowed values."""
        for name, stage in self.stages.items():
            yield from _stage_problems(f"profiles.stages.{name}", stage)


@functools.lru_cache(maxsize=4096)
def seconds_table(instance: InstanceProfile, most: int) -> np.ndarray:
    """float64 [most], read-only: `instance.seconds` of 1, 2, ... items."""
    counts = np.arange(1, most + 1, dtype=np.float64)
    items = np.array([point.num_items for point in instance.points], dtype=np.float64)
    times = np.array([point.seconds for point in instance.points])
    if len(items) == 1:
        seconds = times[0] * counts / items[0]
    else:
        seconds = np.interp(counts, items, times)
        below, above = counts < items[0], counts > items[-1]
        slope = (times[1] - times[0]) / (items[1] - items[0])
        line = times[0] - slope * (items[0] - counts[below])
        seconds[below] = np.maximum(line, times[0] * counts[below] / items[0])
        slope = max((times[-1] - times[-2]) / (items[-1] - items[-2]), 0.0)
        seconds[above] = times[-1] + slope * (counts[above] - items[-1])
    seconds.flags.writeable = False
    return seconds


@functools.lru_cache(maxsize=64)
def _typical(costs: ItemCosts, num_items: int) -> np.ndarray:
    shuffled = np.random.default_rng(num_items).permutation(costs.quantiles(num_items))
    shuffled.flags.writeable = False
    return shuffled


def _stage_problems(at: str, stage: StageProfile) -> Iterator[str]:
    if stage.batching not in get_args(Batching):
        yield f"{at}.batching={stage.batching!r}{did_you_mean(stage.batching, get_args(Batching))}"
    if stage.rounds < 1:
        yield f"{at}.rounds={stage.rounds} must be at least 1"
    for key in ("max_instances", "weights_bytes"):
        if getattr(stage, key) < 0:
            yield f"{at}.{key}={getattr(stage, key)} must not be negative"
    if stage.cores is not None and not 0 <= stage.cores <= MAX_CORES:
        yield f"{at}.cores={stage.cores} must be from 0 to {MAX_CORES:,}"
    yield from _cost_problems(f"{at}.costs", stage.costs)
    if not stage.instances:
        yield f"{at}.instances is empty; give at least one parallel choice"
    spans = [(instance.num_devices, instance.device_name, instance.num_ranks) for instance in stage.instances]
    for i, instance in enumerate(stage.instances):
        yield from _instance_problems(f"{at}.instances[{i}]", instance)
        if spans.index(spans[i]) < i:
            yield f"{at}.instances[{i}].num_devices={instance.num_devices} is there twice; keep one"
        elif not instance.num_ranks and sum(instance.fits_like(other) for other in stage.instances) > 1:
            yield f"{at}.instances[{i}].num_ranks=0 is any number, but others of its devices name theirs; name this one"


def _cost_problems(at: str, costs: ItemCosts) -> Iterator[str]:
    if costs.spread not in get_args(Spread):
        yield f"{at}.spread={costs.spread!r}{did_you_mean(costs.spread, get_args(Spread))}"
    if not 0 <= costs.sigma <= 5:
        yield f"{at}.sigma={costs.sigma} must be from 0 to 5"
    if costs.spread == "samples" and not costs.samples:
        yield f"{at}.samples is empty; give measured costs or use another spread"
    if any(not cost > 0 for cost in costs.samples):
        yield f"{at}.samples must be positive; found {min(costs.samples)}"
    if costs.longest is not None and not costs.longest >= 1:
        yield f"{at}.longest={costs.longest} must be at least 1, the mean"


def _instance_problems(at: str, instance: InstanceProfile) -> Iterator[str]:
    if instance.num_devices < 0:
        yield f"{at}.num_devices={instance.num_devices} must not be negative"
    if not instance.points:
        yield f"{at}.points is empty; give at least one time"
    for i, point in enumerate(instance.points):
        if point.num_items < 1:
            yield f"{at}.points[{i}].num_items={point.num_items} must be at least 1"
        if not 0 < point.seconds <= MAX_SECONDS:
            yield f"{at}.points[{i}].seconds={point.seconds} must be positive and at most {MAX_SECONDS:g}"
        if i and point.num_items <= instance.points[i - 1].num_items:
            yield f"{at}.points[{i}].num_items={point.num_items} must be above the one before it"
    sizes = ("state_bytes", "sharded_state_bytes", "work_bytes", "item_work_bytes")
    for key in ("num_ranks", "max_items", *sizes):
        if getattr(instance, key) < 0:
            yield f"{at}.{key}={getattr(instance, key)} must not be negative"
    for key in ("step_s", "onload_s", "offload_s"):
        value = getattr(instance, key)
        if value is not None and not 0 <= value <= MAX_SECONDS:
            yield f"{at}.{key}={value} must be from 0 to {MAX_SECONDS:g}"


def _normal_quantiles(shares: np.ndarray) -> np.ndarray:
    """The quantiles of the standard normal distribution at these shares."""
    inverse = NormalDist().inv_cdf
    return np.array([inverse(share) for share in np.clip(shares, 1e-12, 1 - 1e-12)])
