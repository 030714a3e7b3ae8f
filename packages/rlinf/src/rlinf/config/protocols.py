"""Protocols of published LIBERO evaluations, as settings: `--protocol openvla`.

What they have in common: every task of the suite, the shipped start states from number 0 on, 10 actions without motion
before an episode begins, pictures drawn in full at 256 x 256 pixels, an end at success, and no exploration. They differ
in limits, in the number of starts, in how many actions of an answer are executed and in how often one is denoised.

One thing cannot be taken over. LIBERO also draws the places of fixtures, a centimetre or two, from a generator that all
episodes of a process share, so that they depend on the episodes before; here they depend on the episode's seed.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field

from rlinf.config.overrides import Override
from rlinf.config.playing import TrainedConfig
from rlinf.errors import UserError

_OPENVLA_LIMITS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
_NUM_TASKS = {"libero_90": 90}
_NUM_TASKS_OF_OTHERS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class PublishedProtocol:
    """The evaluation of LIBERO in one repository."""

    source: str
    """The file that it was read from."""
    limits: Mapping[str, int]
    """Suite -> actions after which an episode is cut off, without the wait before it."""
    num_starts: int = 50
    """Episodes of each task: the shipped states 0 to num_starts - 1."""
    policy_options: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """Policy -> its options; those of other policies stay as they are."""
    remark: str = ""
    """What differs from a reader's expectation."""


PROTOCOLS: Mapping[str, PublishedProtocol] = {
    "openvla": PublishedProtocol(
        source="openvla/openvla, experiments/robot/libero/run_libero_eval.py",
        limits=_OPENVLA_LIMITS,
        policy_options={"openvla_oft": {"chunk_size": 8}},
    ),
    "openpi": PublishedProtocol(
        source="Physical-Intelligence/openpi, examples/libero/main.py, and Pi0.sample_actions of models/pi0.py",
        limits=_OPENVLA_LIMITS,
        policy_options={name: {"chunk_size": 5, "num_denoising_steps": 10} for name in ("pi0", "pi05")},
    ),
    "lerobot": PublishedProtocol(
        source="huggingface/lerobot, src/lerobot/envs/libero.py and docs/source/libero.mdx",
        limits={**_OPENVLA_LIMITS, "libero_spatial": 280},
        num_starts=10,
        policy_options={
            "pi05": {"chunk_size": 10, "num_denoising_steps": 10},
            # arXiv:2506.01844, 4.3, and HuggingFaceVLA/smolvla_libero
            "smolvla": {"chunk_size": 1, "num_denoising_steps": 10},
        },
        remark="lerobot-eval takes the next start state at every reset, so which ones it evaluates depends on when "
        "episodes end; with one episode for each environment, as here, they are the first ten",
    ),
    "simplevla": PublishedProtocol(
        source="PRIME-RL/SimpleVLA-RL, verl/workers/rollout/rob_rollout.py",
        limits=dict.fromkeys(_OPENVLA_LIMITS, 512),
        policy_options={"openvla_oft": {"chunk_size": 8}},
    ),
}
"""Name -> the protocol. The limits of openvla and openpi are equal; lerobot gives libero_spatial 280 actions, and
SimpleVLA-RL gives every suite 512, fewer than openvla gives libero_10."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenProtocol:
    """A published protocol for one policy's environment."""

    name: str
    overrides: tuple[Override, ...]
    """Keys of the policy's config, to be set before those of the command line."""
    num_episodes: int
    first_seed: int
    note: str
    """For the manifest."""


def chosen_protocol(name: str, config: TrainedConfig) -> ChosenProtocol:
    """Returns the settings of a published protocol.

    Raises: UserError for an unknown name, and for an environment that the protocol does not cover.
    """
    if name not in PROTOCOLS:
        close = difflib.get_close_matches(name, PROTOCOLS, n=1, cutoff=0.5)
        guess = f"; did you mean {close[0]}?" if close else ""
        raise UserError(f"--protocol {name} is none of {', '.join(PROTOCOLS)}{guess}")
    protocol, env, policy = PROTOCOLS[name], config.env, config.policy
    if env.kind != "libero" or env.id not in protocol.limits:
        raise UserError(
            f"--protocol {name} is for env.kind=libero with one of {', '.join(protocol.limits)}, and the policy acts "
            f"in env.kind={env.kind}, env.id={env.id}",
            hint="choose a suite with --env.id, or leave the protocol out",
        )
    num_tasks = _NUM_TASKS.get(env.id, _NUM_TASKS_OF_OTHERS)
    settings = {
        "env.max_episode_steps": str(protocol.limits[env.id]),
        "env.eval_ignore_terminations": "false",
        "env.options.tasks": "null",
        "env.options.init_states": f"0-{protocol.num_starts - 1}",
        "env.options.num_wait_steps": "10",
        "env.options.quality": "full",
        "env.options.rotate": "true",
    }
    if env.options.get("cameras"):
        settings["env.options.image_size"] = "256"
    for option, number in protocol.policy_options.get(policy.name, {}).items():
        settings[f"policy.options.{option}"] = str(number)
    num_episodes = num_tasks * protocol.num_starts
    note = (
        f"--protocol {name}, after {protocol.source}: {protocol.num_starts} starts of each of {num_tasks} tasks, "
        f"{', '.join(f'{key}={value}' for key, value in settings.items())}"
    )
    return ChosenProtocol(
        name=name,
        overrides=tuple(Override(key=tuple(key.split(".")), text=value) for key, value in settings.items()),
        num_episodes=num_episodes,
        first_seed=0,
        note=f"{note}. {protocol.remark}" if protocol.remark else note,
    )
