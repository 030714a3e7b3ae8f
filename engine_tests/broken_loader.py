"""A weight loader for SGLang that says success and may have done something else: what the file FAULT_FILE says.

A line of it is a fault and its arguments, parameters by SGLang's names:

    nothing                     nothing is filled
    skip PARAMETER              it keeps what it had
    swap A B PARAMETER...       its experts A and B change places
    flip RANK PARAMETER BIT     one bit of it flips, in the process of that rank
    old                         every parameter keeps what it had
    older                       it is filled with the version before
    replace PARAMETER           the model serves a copy of what it had
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf_workers.engines.inside import Inside
from rlinf_workers.engines.sglang import inside

LOADER = f"{__name__}.run"
FAULT_FILE = "RLINF_TEST_FAULT_FILE"


class Broken(Inside):
    model: Any
    rank = 0

    def fill(self, edge: str, policy_version: int, timeout_s: float) -> None:
        fault, *arguments = Path(os.environ[FAULT_FILE]).read_text().split() or [""]
        before = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        if fault != "nothing":
            super().fill(edge, policy_version - (fault == "older"), timeout_s)
        apply(fault, arguments, dict(self.model.named_parameters()), before, self.rank)


def apply(fault: str, arguments: list[str], served: Mapping[str, Tensor], before: Mapping[str, Tensor], rank: int):
    """What has to be done to parameters that were filled."""
    if fault == "skip":
        served[arguments[0]].data.copy_(before[arguments[0]])
    elif fault == "swap":
        one, other = int(arguments[0]), int(arguments[1])
        for name in arguments[2:]:
            served[name].data[[one, other]] = served[name].data[[other, one]]
    elif fault == "flip" and rank == int(arguments[0]):
        bit = int(arguments[2])
        served[arguments[1]].data.view(-1).view(torch.uint8)[bit // 8] ^= 1 << bit % 8
    elif fault == "old":
        for name, tensor in before.items():
            served[name].data.copy_(tensor)
    elif fault == "replace":
        served[arguments[0]].data = before[arguments[0]]


def run(model, named_tensors):
    from sglang.srt.runtime_context import get_parallel  # pyright: ignore[reportMissingImports]

    Broken.rank = get_parallel().tp_rank
    inside.run(model, named_tensors, kind=Broken)
