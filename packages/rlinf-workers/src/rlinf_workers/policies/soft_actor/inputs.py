"""What a soft actor and its critics see: the state, and features of pictures.

As in DrQ-v2 (arXiv:2107.09645): the critics alone train a convolutional encoder, the policy has a copy of it, and each
of policy, critics and target critics projects its features to a few numbers on its own. The targets' features are those
of the trained encoder.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlinf_envs import PICTURE, FieldSpec
from rlinf_workers.policies.base import Fields, PolicyError
from rlinf_workers.policies.picture_encoder import PictureEncoder, encoded_cameras
from rlinf_workers.policies.state_statistics import check_state

ENCODED = "encoded"
"""Field with the features of pictures, in place of these."""
NUM_PROJECTED = 50
"""Numbers that features are projected to."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SoftActorOptions:
    """Options of the policy and of its critics."""

    hidden_size: int = 256
    """Width of the hidden layers."""
    num_layers: int = 2
    """Hidden layers of the policy, and of each critic."""
    chunk_size: int = 1
    """Actions per forward pass, executed one after the other; the critics value whole chunks."""
    cameras: str | None = None
    """Names of cameras, as in "image.<camera>", separated by commas; None: all that the environment shows, "": none."""
    reads_state: bool = True
    """Whether the state, if there is one, is an input beside pictures."""


def fields_to_read(fields: Mapping[str, FieldSpec], options: SoftActorOptions) -> tuple[str, ...]:
    """The fields of cameras, then "state". Raises: PolicyError if there is nothing to read, or a wrong shape."""
    shows_pictures = any(name.startswith(PICTURE) for name in fields)
    wants_pictures = shows_pictures if options.cameras is None else options.cameras != ""
    cameras = encoded_cameras(fields, options.cameras) if wants_pictures else ()
    if cameras and ("state" not in fields or not options.reads_state):
        return cameras
    if "state" not in fields:
        raise PolicyError(f"it reads 'state' or pictures, and the environment shows {', '.join(sorted(fields))}")
    check_state(fields)
    return (*cameras, "state")


def make_encoder(fields: Mapping[str, FieldSpec], reads: tuple[str, ...]) -> PictureEncoder | None:
    """The encoder of the pictures that are read; None: there are none."""
    cameras = [name for name in reads if name.startswith(PICTURE)]
    return PictureEncoder(fields, cameras) if cameras else None


def encoded(fields: Fields, encoder: PictureEncoder | None) -> Fields:
    """The fields with `ENCODED` in place of pictures, unless that has been done."""
    if encoder is None or ENCODED in fields:
        return fields
    others = {name: values for name, values in fields.items() if not name.startswith(PICTURE)}
    return {**others, ENCODED: encoder(fields)}


class SoftInputs(nn.Module):
    """Encoded fields -> [n, size]."""

    def __init__(self, fields: Mapping[str, FieldSpec], reads: tuple[str, ...], encoder: PictureEncoder | None) -> None:
        super().__init__()
        self.projection = None
        self._reads_state = "state" in reads
        self.size = fields["state"].shape[0] if self._reads_state else 0
        if encoder is not None:
            layers = nn.Linear(encoder.num_features, NUM_PROJECTED), nn.LayerNorm(NUM_PROJECTED), nn.Tanh()
            self.projection = nn.Sequential(*layers)
            self.size += NUM_PROJECTED

    def forward(self, fields: Fields) -> Tensor:
        parts = [] if self.projection is None else [self.projection(fields[ENCODED])]
        return torch.cat([*parts, fields["state"]] if self._reads_state else parts, dim=-1)
