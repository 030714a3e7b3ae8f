"""A weight loader for SGLang that says success and may have done something else: what the file FAULT_FILE says."""

import os
from pathlib import Path
from typing import Any

import torch

from rlinf_workers.generation.inside import Inside, enter

LOADER = f"{__name__}.run"
FAULT_FILE = "RLINF_TEST_FAULT_FILE"
ATTENTION = "model.layers.1.self_attn.qkv_proj.weight"
EXPERTS = "model.layers.1.mlp.experts.w13_weight"


class Broken(Inside):
    model: Any

    def fill(self, *arguments):
        fault = Path(os.environ[FAULT_FILE]).read_text()
        parameters = dict(self.model.named_parameters())
        before = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        if fault != "nothing":
            super().fill(*arguments)
        if fault == "skip":
            parameters[ATTENTION].data.copy_(before[ATTENTION])
        elif fault == "swap":
            parameters[EXPERTS].data[[0, 3]] = parameters[EXPERTS].data[[3, 0]]
        elif fault == "bit":
            parameters[ATTENTION].data.view(-1).view(torch.uint8)[30] ^= 1
        elif fault == "old":
            for name, kept in before.items():
                parameters[name].data.copy_(kept)
        elif fault == "replace":
            parameters[ATTENTION].data = before[ATTENTION]


def run(model, named_tensors):
    from sglang.srt.runtime_context import get_parallel  # pyright: ignore[reportMissingImports]

    parallel = get_parallel()
    sizes = {"tp": parallel.attn_tp_size, "ep": parallel.moe_ep_size, "expert_tp": parallel.moe_tp_size}
    for ticket, _ in named_tensors:
        enter(ticket, model, rank=parallel.tp_rank, sizes=sizes, kind=Broken)
