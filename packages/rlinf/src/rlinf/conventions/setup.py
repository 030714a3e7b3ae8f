"""Prepares the check of a robot policy: from a config to a verdict."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from rlinf.config.devices import device_kind
from rlinf.config.robot_check import RobotCheckConfig
from rlinf.conventions.actions import alternatives_of_actions
from rlinf.conventions.answers import Answers
from rlinf.conventions.checked import ConventionVerdict, check_conventions
from rlinf.conventions.demonstrations import read_demonstrations
from rlinf.conventions.environment import frame_mismatches, replays
from rlinf.conventions.frames import CLOSE_FRAMES_EACH, ComparedFrames, frames_of
from rlinf.conventions.numbers import range_lines
from rlinf.conventions.observations import alternatives_of_observations
from rlinf.conventions.options import alternatives_of_options
from rlinf.errors import UserError
from rlinf.jobs.acting import chosen_policy, env_spec, policy_settings
from rlinf.jobs.env_interface import needs_of, probe
from rlinf.machine import machine_of
from rlinf_envs import EXPERTS, EnvError
from rlinf_workers import WeightFilesError
from rlinf_workers.plugins import POLICIES
from rlinf_workers.policies import Policy, PolicyError, PolicySettings, make_policy
from rlinf_workers.roles import load_policy


def check_robot(
    config: RobotCheckConfig, model: Path | None, *, progress: Callable[[str], None] = lambda text: None
) -> ConventionVerdict:
    """Checks a policy in this process.

    Args:
        model: folder of a checkpoint's weights; None: the published checkpoint of `policy.options.folder`.

    Raises: UserError for an environment, a policy or demonstrations that do not fit, and a policy without weights.
    """
    if model is None and config.policy.options.get("folder") is None:
        raise UserError(
            "the policy has random weights, so there is nothing to check",
            hint="give the folder of a run in place of the recipe, or a published checkpoint with "
            "--policy.options.folder",
        )
    spec = env_spec(config.env)
    interface = probe(spec)
    policy, _ = chosen_policy(config.policy, interface, config.env.id)
    settings = policy_settings(policy, interface, config.seed)
    reads = needs_of(settings, config.env.id).reads
    progress("reading the demonstrations")
    demonstrations, starts = read_demonstrations(config.demonstrations, config.env, interface, reads)
    fields = tuple(interface.fields)
    frames = frames_of(demonstrations, fields, interface.actions)
    closer = frames_of(demonstrations, fields, interface.actions, num_each=CLOSE_FRAMES_EACH)
    device = torch.device(device_kind(config.cluster, machine_of(config.cluster)))
    answers = Answers(_maker(settings, model, frames, device), frames)
    state = interface.fields.get("state")
    alternatives = [
        *alternatives_of_options(settings.name, settings.options),
        *alternatives_of_observations(interface.fields, reads),
        *alternatives_of_actions(
            interface.actions, state_size=state.shape[0] if state and len(state.shape) == 1 else 0
        ),
    ]
    progress("replaying demonstrations")
    try:
        replayed = replays(spec, demonstrations, starts)
        is_recorded = config.demonstrations.source == EXPERTS
        mismatches = [] if is_recorded else frame_mismatches(spec, demonstrations, reads)
    except EnvError as error:
        raise UserError(f"env.id={config.env.id!r}: {error}") from error
    progress("loading the policy")
    try:
        span = answers.as_configured().action_range()
    except (PolicyError, WeightFilesError) as error:
        raise UserError(f"policy.name={settings.name!r}: {error}") from error
    return check_conventions(
        answers,
        reads,
        alternatives,
        closer=closer,
        mismatches=mismatches,
        replays=replayed,
        lines=range_lines(demonstrations, frames, span),
        progress=progress,
    )


def _maker(
    settings: PolicySettings, model: Path | None, frames: ComparedFrames, device: torch.device
) -> Callable[[Mapping[str, Any]], Policy]:
    def make(changes: Mapping[str, Any]) -> Policy:
        options = {**settings.options, **changes}
        needs = POLICIES.get(settings.name).needs(settings.fields, settings.actions, **options)
        if lacking := [name for name in needs.reads if name not in frames.fields]:
            raise PolicyError(f"the demonstrations have no {', '.join(lacking)}")
        changed = replace(settings, options=options)
        return make_policy(changed, device) if model is None else load_policy(changed, str(model), device)

    return make
