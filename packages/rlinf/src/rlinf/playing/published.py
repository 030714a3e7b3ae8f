"""Exports a trained robot policy in the format of the published checkpoint that it started from."""

from __future__ import annotations

from pathlib import Path

import torch

from rlinf.config.load import load_trained
from rlinf.errors import UserError
from rlinf.playing.loaded import policy_of
from rlinf.run_folder.checkpoints import MODEL
from rlinf_workers.policies import PolicyError


def write_published(checkpoint: Path, folder: Path, dtype: str | None) -> tuple[str, ...]:
    """Writes the policy of a checkpoint, whose digests were checked, into an existing folder, with its adapter merged.

    Returns: the modules for which the format has no place, such as a value head.
    Raises: UserError for a policy that did not start from a published checkpoint.
    """
    policy, _ = policy_of(load_trained(checkpoint.parent.parent), checkpoint, torch.device("cpu"))
    try:
        others = policy.write_published(folder, None if dtype is None else getattr(torch, dtype))
    except PolicyError as error:
        weights = ", ".join(str(file) for file in sorted((checkpoint / MODEL).glob("*.safetensors")))
        raise UserError(
            f"{checkpoint}: {error}", hint=f"its weights, under the names of the policy's state_dict, are {weights}"
        ) from error
    return tuple(dict.fromkeys(name.partition(".")[0] for name in others))
