"""Engines that sample from another model than the trainer has, and say nothing of it."""

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from rlinf_workers.engines import HuggingFaceEngine
from rlinf_workers.engines.spec import EngineSpec
from rlinf_workers.models import fp8_modules


class OtherTemperature(HuggingFaceEngine):
    """Five per cent hotter than it was told."""

    def submit(self, prompts, sampling, *, seed, step):
        super().submit(prompts, replace(sampling, temperature=1.05 * sampling.temperature), seed=seed, step=step)


class OtherScales(HuggingFaceEngine):
    """Computes with scales of its FP8 weights that are a thousandth too large, and holds the right ones."""

    spec = EngineSpec(quantizations=("fp8",))

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        dequantize = fp8_modules.dequantize
        fp8_modules.dequantize = lambda values, scales, dtype: dequantize(values, 1.001 * scales, dtype)


class FirstVersion(HuggingFaceEngine):
    """Takes every sync, and goes on with the weights of the first."""

    _mailbox: Mapping[str, Tensor] | None = None

    def weights(self) -> Mapping[str, Tensor]:
        if self._mailbox is None:
            self._mailbox = {name: torch.empty_like(tensor.detach()) for name, tensor in super().weights().items()}
        return self._mailbox

    def weights_received(self, policy_version):
        if self._version < 0:
            for name, tensor in super().weights().items():
                tensor.detach().copy_(self.weights()[name])
        super().weights_received(policy_version)
