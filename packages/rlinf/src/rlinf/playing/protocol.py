"""The protocol of an evaluation: everything that decides its numbers besides the policy's weights.

Two evaluations with the same digest had the same starts, limits, pictures and simulator, so that their difference is
the policies'.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from rlinf.errors import UserError

MAX_LISTED = 6
"""Differing keys that a message names; result.json has all."""
SHOWN = 12
"""Digits of a digest in messages; result.json has all 64."""
NOT_THERE = "-"


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    """The conditions of an evaluation.

    Example: libero_spatial as OpenVLA evaluates it: seeds 0 to 499 are 50 shipped starts of each of 10 tasks.
        kind="libero", env="libero_spatial", first_seed=0, num_episodes=500, max_episode_steps=220, ends_early=True,
        chunk_size=1, simulator={"option.num_wait_steps": "10", "version.mujoco": "3.3.2", ...}
    """

    kind: str
    """`env.kind`."""
    env: str
    """`env.id`."""
    first_seed: int
    num_episodes: int
    """Episode i has the seed first_seed + i."""
    max_episode_steps: int
    """Actions after which an episode is cut off, without the wait before it begins."""
    ends_early: bool
    """Whether an episode also ends where the environment ends it, such as at success."""
    chunk_size: int
    """Actions that are executed per answer of the policy."""
    acting: Mapping[str, str] = field(default_factory=dict)
    """Options of the policy that decide its answers besides its weights (`Needs.acting`)."""
    simulator: Mapping[str, str] = field(default_factory=dict)
    """Tasks, options with defaults, drawing, versions, and digests of files (`KindSpec.evaluation_facts`)."""
    disturbance: Mapping[str, str] = field(default_factory=dict)
    """What is changed in the observations; empty: nothing."""

    def flat(self) -> dict[str, Any]:
        """Returns dotted key -> value."""
        return flat(asdict(self))

    @property
    def digest(self) -> str:
        """SHA-256 of the keys and values as canonical JSON, in hexadecimal."""
        return digest_of(self.flat())

    def to_json(self) -> dict[str, Any]:
        """Returns the record for result.json."""
        return {"digest": self.digest, **asdict(self)}

    @property
    def line(self) -> str:
        """Describes the protocol in one line."""
        ends = "or to the environment's end" if self.ends_early else "whatever happens before"
        answers = f"{self.chunk_size} actions an answer" if self.chunk_size > 1 else "1 action an answer"
        versions = [f"{name[8:]} {value}" for name, value in self.simulator.items() if name.startswith("version.")]
        parts = [
            f"{self.kind} {self.env}",
            f"seeds {self.first_seed} to {self.first_seed + self.num_episodes - 1}",
            f"at most {self.max_episode_steps} actions {ends}",
            answers,
            *versions,
        ]
        return f"protocol {self.digest[:SHOWN]}: {', '.join(parts)}"


def digest_of(values: Mapping[str, Any]) -> str:
    """Returns the SHA-256 of flat values, independent of their order."""
    text = json.dumps(dict(values), sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def flat(node: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns dotted key -> value of nested values, without a digest that is stored with them."""
    values: dict[str, Any] = {}
    for name, value in node.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{prefix}{name}.")
        elif prefix or name != "digest":
            values[f"{prefix}{name}"] = value
    return values


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns dotted key -> (value in `one`, value in `other`) for keys whose values differ, in the record's order.

    Args:
        one: a record as `Protocol.to_json` returns it, or as it was read from result.json.
    """
    first, second = flat(one), flat(other)
    keys = [*first, *(key for key in second if key not in first)]
    pairs = {key: (first.get(key, NOT_THERE), second.get(key, NOT_THERE)) for key in keys}
    return {key: pair for key, pair in pairs.items() if pair[0] != pair[1]}


def joint(a: Mapping[str, Any], b: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the record of two evaluations: the one of both, or each under its name."""
    return dict(a) if a == b else {"a": dict(a), "b": dict(b)}


def check_same(one: Mapping[str, Any], other: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raises: UserError that names the first differing keys of two records, without options that only one policy has.

    Args:
        names: what the messages call the two evaluations.
    """
    differences = {
        key: pair
        for key, pair in differing(one, other).items()
        if not (key.startswith("acting.") and NOT_THERE in pair)
    }
    if not differences:
        return
    lines = [f"  - {key}: {_short(a)} and {_short(b)}" for key, (a, b) in list(differences.items())[:MAX_LISTED]]
    if len(differences) > MAX_LISTED:
        lines.append(f"  - and {len(differences) - MAX_LISTED} more")
    raise UserError(
        f"{names[0]} and {names[1]} were not evaluated alike, so a difference would not be the policies' alone:\n"
        + "\n".join(lines),
        hint="give both the same keys (--env.KEY and --policy.KEY hold for both), or --force to compare all the same",
    )


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:48]}... ({len(text)} characters)"
