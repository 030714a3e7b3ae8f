"""A small network that sees in pictures whether a task is solved: the encoder of the policy `cnn`, and a hidden layer.

As in HIL-SERL (arXiv:2410.21845, section III-D), it classifies single moments, and its verdict is the reward of a
rollout. There the encoder is pretrained; here all weights are trained.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import safetensors.torch
import torch
from torch import Tensor, nn

from rlinf_envs import EnvError, FieldSpec, SuccessClassifier, Verdict
from rlinf_workers.models import write_tensors
from rlinf_workers.policies.base import Fields
from rlinf_workers.policies.layers import orthogonal
from rlinf_workers.policies.picture_encoder import PictureEncoder

HIDDEN_SIZE = 64
CLASSIFIER_LOADER = f"{__name__}:load_classifier"
"""Of every `SuccessClassifier` that `PictureClassifier.save` returns."""
SHAPE = "shape."
"""Prefix of the tensors that hold the shape of a camera's pictures."""


class PictureClassifier(nn.Module):
    """Pictures [n, H, W, C] uint8 of cameras -> logits [n] of success.

    Args:
        cameras: field "image.<camera>" -> [H, W, C].
    """

    def __init__(self, cameras: Mapping[str, tuple[int, ...]], seed: int = 0) -> None:
        super().__init__()
        self.cameras = dict(sorted(cameras.items()))
        fields = {name: FieldSpec(shape=shape, dtype="uint8") for name, shape in cameras.items()}
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.encoder = PictureEncoder(fields, list(self.cameras))
            hidden = orthogonal(nn.Linear(self.encoder.num_features, HIDDEN_SIZE))
            self.head = nn.Sequential(hidden, nn.ReLU(), orthogonal(nn.Linear(HIDDEN_SIZE, 1), 1.0))

    def forward(self, fields: Fields) -> Tensor:
        return self.head(self.encoder(fields))[:, 0]

    def raise_threshold(self, probability: float) -> None:
        """From now on, a logit is above 0 if the probability of success was above this."""
        bias = self.head[-1].bias
        assert isinstance(bias, Tensor), "it is a linear layer"
        with torch.no_grad():
            bias -= math.log(probability / (1 - probability))

    def save(self, file: Path) -> SuccessClassifier:
        """Writes the weights, and the shapes of pictures."""
        shapes = {SHAPE + name: torch.tensor(shape) for name, shape in self.cameras.items()}
        digest = write_tensors(file, {**self.state_dict(), **shapes})
        return SuccessClassifier(loader=CLASSIFIER_LOADER, file=str(file), digest=digest)


def load_classifier(file: str, digest: str) -> Verdict:
    """Returns the verdict of a classifier that was saved. A row is classified alone, so its verdict does not depend on
    others.

    Raises: EnvError if the file cannot be read, or is another one.
    """
    try:
        content = Path(file).read_bytes()
    except OSError as error:
        raise EnvError(f"success classifier {file}: {error.strerror}") from error
    if (actual := hashlib.sha256(content).hexdigest()) != digest:
        raise EnvError(f"success classifier {file} has the digest {actual[:16]}, and the run's has {digest[:16]}")
    tensors = safetensors.torch.load(content)
    names = [name for name in tensors if name.startswith(SHAPE)]
    cameras = {name.removeprefix(SHAPE): tuple(tensors.pop(name).tolist()) for name in names}
    classifier = PictureClassifier(cameras)
    classifier.load_state_dict(tensors)
    classifier.eval()

    def sees_success(observation: Mapping[str, np.ndarray | str]) -> bool:
        pictures = {name: torch.from_numpy(np.array(observation[name]))[None] for name in cameras}
        with torch.inference_mode():
            return bool(classifier(pictures)[0] > 0)

    return sees_success
