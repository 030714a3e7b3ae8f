"""Plants wrong conventions in right set-ups, and compares them with what `rlinf check` names.

Each of the three policies is trained once; then 20 right set-ups, 15 single corruptions and pairs are checked. With
another `--seed` all of it is drawn anew: the weights, the demonstrations and the pairs. Writes a file for each policy.

Black pictures hide what is wrong beside them: whether they are turned, entirely, and most of the rest, since the policy
sees nothing. Pairs with them are therefore cases of their own, `hidden`, and `pair` are 15 of the others. `drawn` are
15 of all pairs, of both kinds.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from hashlib import blake2b
from itertools import combinations, permutations
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.conventions.policies import KIND, TINY, TinyPolicy, stored, trained
from benchmarks.harness import RESULTS_FOLDER, report
from torch import Tensor

from rlinf.config.embodied import EnvConfig, PolicyConfig
from rlinf.config.robot_check import CheckedDemonstrations, RobotCheckConfig
from rlinf.conventions import answers
from rlinf.conventions.checked import ConventionVerdict
from rlinf.conventions.setup import check_robot
from rlinf_workers.policies import Policy, PolicySettings

NUM_PAIRS, NUM_RIGHT = 15, 20
EVAL_SEED, SEEDS_APART = 50_000, 500
SEEDS_OF_A_DRAW = 20_000
OUTCOMES = ("right", "among_three", "exact", "none_wrong")


@dataclass(frozen=True, kw_only=True, slots=True)
class Corruption:
    """One wrong convention."""

    name: str
    convention: str
    """What the check should call it."""
    env: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def keys(self) -> set[str]:
        return {*self.env, *self.options}


def _of(name: str, convention: str, options: Mapping[str, Any] | None = None, **env: Any) -> Corruption:
    return Corruption(name=name, convention=convention, env=env, options=options or {})


BLACK = _of("floats read as bytes", "picture range", levels="floats")
PICTURES = (
    _of("pictures rotated", "picture rotation", turn="rotated"),
    _of("pictures mirrored", "picture left-right", turn="left_right"),
    _of("pictures upside down", "picture top-bottom", turn="top_bottom"),
    _of("cameras swapped", "camera order", swap_cameras=True),
    _of("BGR", "colour order", colours="bgr"),
    BLACK,
)
CORRUPTIONS: Mapping[str, tuple[Corruption, ...]] = {
    "cnn": (
        *PICTURES,
        _of("not cropped", "centre crop", zoom=1.0),
        _of("gripper negated", "gripper sign", gripper="open_is_one"),
        _of("gripper from -1", "gripper range", gripper="closes_is_one"),
        _of("gripper from -1, negated", "gripper range", gripper="opens_is_one"),
        _of("targets", "delta or absolute actions", motion="absolute"),
        _of("metres", "actions not un-normalised", unit=0.15),
        _of("gripper first in the state", "state order", states="gxyz"),
        _of("no state", "constant state", states="zeros"),
        _of("x and y swapped", "action axes", axes="yxz"),
    ),
    "pi0": (
        *PICTURES,
        _of("not cropped", "centre crop", zoom=1.0),
        _of("gripper negated", "gripper sign", gripper="open_is_one"),
        _of("gripper from -1", "gripper range", gripper="closes_is_one"),
        _of("not relative to the state", "delta or absolute actions", {"relative_to_state": False}),
        _of("mean and deviation", "statistics kind", {"normalization": "mean_std"}),
        _of("statistics of another robot", "statistics key", {"dataset": "another/robot"}),
        _of("instructions in capitals", "prompt form", wording="capitals"),
        _of("gripper first in the state", "state order", states="gxyz"),
        _of("x and y swapped", "action axes", axes="yxz"),
    ),
    "openvla_oft": (
        *PICTURES,
        _of("not cropped", "centre crop", {"center_crop": False}),
        _of("gripper negated", "gripper sign", {"gripper": "open_is_minus_one"}),
        _of("gripper from 0", "gripper range", {"gripper": "as_is"}),
        _of("targets", "delta or absolute actions", motion="absolute"),
        _of("bounds", "statistics kind", {"normalization": "bounds"}),
        _of("statistics of another robot", "statistics key", {"unnorm_key": "another_robot"}),
        _of("underscores in instructions", "prompt form", wording="underscores"),
        _of("another chunk size", "chunk length", {"chunk_size": 8}),
        _of("gripper first in the state", "state order", states="gxyz"),
    ),
}


class SharedAnswers:
    """A policy's answers over all cases, many of which show it the same frames; in place of `answers._acted`."""

    def __init__(self, act: Callable[[Policy, Mapping[str, Tensor]], Tensor]) -> None:
        self._act = act
        self._answers: dict[bytes, Tensor] = {}

    def __call__(self, policy: Policy, fields: Mapping[str, Tensor]) -> Tensor:
        digest = blake2b(repr(getattr(policy, "_options", "")).encode())
        for name, values in sorted(fields.items()):
            digest.update(name.encode() + values.contiguous().numpy().tobytes())
        if (key := digest.digest()) not in self._answers:
            self._answers[key] = self._act(policy, fields)
        return self._answers[key]


def checked(
    tiny: TinyPolicy, settings: PolicySettings, folder: Path, corruptions: Sequence[Corruption] = (), *, number: int = 0
) -> ConventionVerdict:
    """Checks a set-up with some corruptions.

    Args:
        folder: of the weights, for a policy without a published folder.
        number: other demonstrations for each number.
    """
    env_options, options = dict(tiny.env), dict(settings.options)
    for one in corruptions:
        env_options |= one.env
        options |= one.options
    config = RobotCheckConfig(
        name=tiny.name,
        env=EnvConfig(
            kind=KIND,
            id="picking",
            num_envs=1,
            num_groups=1,
            max_episode_steps=60,
            options=env_options,
            eval_seed=EVAL_SEED + SEEDS_OF_A_DRAW * settings.seed + SEEDS_APART * number,
        ),
        policy=PolicyConfig(name=tiny.name, options=options),
        demonstrations=CheckedDemonstrations(source="experts"),
    )
    return check_robot(config, folder if tiny.name == "cnn" else None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One set-up to check."""

    kind: str
    """right, single, pair or hidden."""
    planted: tuple[Corruption, ...] = ()
    number: int = 0
    """Number of the demonstrations."""
    is_drawn: bool = False
    """Whether it is one of `NUM_PAIRS` pairs that are drawn from all."""


def pair_cases(name: str, seed: int) -> list[Case]:
    """Pairs of corruptions that change different keys: all with black pictures, and 15 others."""
    apart = [pair for pair in combinations(CORRUPTIONS[name], 2) if not pair[0].keys & pair[1].keys]
    draw = random.Random(seed)
    drawn = draw.sample(apart, NUM_PAIRS)
    chosen = [pair for pair in drawn if BLACK not in pair]
    rest = [pair for pair in apart if BLACK not in pair and pair not in drawn]
    chosen += draw.sample(rest, NUM_PAIRS - len(chosen))
    hidden = [pair for pair in apart if BLACK in pair]
    return [Case(kind="pair", planted=pair, is_drawn=pair in drawn) for pair in chosen] + [
        Case(kind="hidden", planted=pair, is_drawn=pair in drawn) for pair in hidden
    ]


def cases_of(name: str, seed: int, only: Sequence[str]) -> list[Case]:
    """The cases of a policy; `only`: of these kinds."""
    cases = [Case(kind="right", number=number) for number in range(NUM_RIGHT)]
    cases += [Case(kind="single", planted=(one,)) for one in CORRUPTIONS[name]]
    cases += pair_cases(name, seed)
    return [case for case in cases if not only or case.kind in only]


def measure(
    tiny: TinyPolicy, folder: Path, seed: int, only: Sequence[str], earlier: Sequence[dict[str, Any]] = ()
) -> dict[str, Any]:
    """All cases of one policy; `folder` has its weights, or gets them. `earlier`: rows that were measured before."""
    began_s, settings = time.process_time(), stored(tiny, folder, seed)
    result: dict[str, Any] = {"training_cpu_s": None, "cases": [*earlier]}  # None: trained before
    if settings is None:
        settings = trained(tiny, folder, seed=seed)
        result["training_cpu_s"] = round(time.process_time() - began_s, 1)
    for case in cases_of(tiny.name, seed, only):
        began_s = time.monotonic()
        verdict = checked(tiny, settings, folder, case.planted, number=case.number)
        row = {
            "kind": case.kind,
            "planted": [one.name for one in case.planted],
            "drawn": case.is_drawn,
            **_judged([one.convention for one in case.planted], verdict),
            "error": round(verdict.search.as_configured.error.mean, 4),
            "explained": round(verdict.search.explained.error.mean, 4),
            "close_frames": verdict.search.num_close_frames,
            "seconds": round(time.monotonic() - began_s, 1),
        }
        result["cases"].append(row)
        print(tiny.name, json.dumps(row), flush=True)
    rows = result["cases"]
    groups = {kind: [row for row in rows if row["kind"] == kind] for kind in ("right", "single", "pair", "hidden")}
    groups["drawn"] = [row for row in rows if row["drawn"]]
    for group, chosen in groups.items():
        for outcome in OUTCOMES:
            result[f"{group}.{outcome}"] = f"{sum(row[outcome] for row in chosen)} of {len(chosen)}"
    return result


def _judged(expected: Sequence[str], verdict: ConventionVerdict) -> dict[str, Any]:
    """How a verdict compares with what was planted.

    A cause counts as the planted one also if that is printed as its equivalent.

    Returns: expected and named conventions, and the outcomes. right: the first causes are the planted ones, or there
        is neither a cause nor a doubt in a right set-up. among_three: the planted ones are among the first three
        conventions, those of the causes and then those of single changes, the lowest error first. exact: right, and
        nothing else is named. none_wrong: nothing is named that was not planted.
    """
    named = [(cause.convention, *(one.convention for one in cause.equivalents)) for cause in verdict.causes]
    ranked = list(named)
    for trial in verdict.search.singles:
        if not any(trial.alternatives[0].convention in one for one in ranked):
            ranked.append((trial.alternatives[0].convention,))
    right = _covers(named[: len(expected)], expected) if expected else verdict.passes
    return {
        "expected": list(expected),
        "named": [" or ".join(one) for one in named],
        "right": right,
        "among_three": _covers(ranked[:3], expected) if expected else right,
        "exact": right and len(named) == len(expected),
        "none_wrong": all(set(one) & set(expected) for one in named),
    }


def _covers(named: Sequence[tuple[str, ...]], expected: Sequence[str]) -> bool:
    """Whether every expected convention is a named one of its own."""
    return any(all(map(tuple.__contains__, order, expected)) for order in permutations(named, len(expected)))


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", choices=list(CORRUPTIONS), action="append")
    parser.add_argument("--only", choices=["right", "single", "pair", "hidden"], action="append", default=[])
    parser.add_argument("--add", action="store_true", help="keep cases of other kinds that the result has already")
    parser.add_argument("--folder", type=Path, help="trained policies, kept for later calls (default: not kept)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, help="folder of the results (default: benchmarks/results)")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        for tiny in TINY:
            if args.policy and tiny.name not in args.policy:
                continue
            folder = (args.folder or Path(scratch)) / f"{tiny.name}-{args.seed}"
            name, tested = f"conventions-{tiny.name.replace('_', '-')}-{args.seed}", {"seed": args.seed, **asdict(tiny)}
            path = (args.output or RESULTS_FOLDER) / f"{name}.json"
            earlier = _earlier_cases(path, tested, args.only) if args.add else []
            with patch.object(answers, "_acted", SharedAnswers(getattr(answers, "_acted"))):  # noqa: B009
                findings = measure(tiny, folder, args.seed, args.only, earlier)
            print(tiny.name, {key: value for key, value in findings.items() if key.endswith(".right")}, flush=True)
            report(name, settings=tested, samples_s={}, comparisons=(), findings=findings, output=path)


def _earlier_cases(path: Path, settings: Mapping[str, Any], only: Sequence[str]) -> list[dict[str, Any]]:
    """The rows of a result, without the kinds that are measured now. Raises: SystemExit if it had other settings."""
    if not path.exists():
        return []
    result = json.loads(path.read_text())
    if result["settings"] != settings:
        raise SystemExit(f"{path} has cases with {result['settings']}, not {settings}")
    return [row for row in result["findings"]["cases"] if only and row["kind"] not in only]


if __name__ == "__main__":
    main()
