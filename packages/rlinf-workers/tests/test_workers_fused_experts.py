"""The order of fused experts in files, for engines that know one of two."""

import json

import pytest
import torch
from safetensors.torch import save_file

from rlinf_workers.engines.fused_experts import experts_as_modelled


@pytest.mark.parametrize("inner", [48, 64], ids=["rectangles", "squares"])
@pytest.mark.parametrize("as_modelled", [True, False])
def test_the_order_of_experts_is_found_in_the_files(tmp_path, as_modelled, inner):
    hidden = 64
    text = {"hidden_size": hidden, "moe_intermediate_size": inner}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": text}))
    gate_up, down = torch.zeros(2, 2 * inner, hidden), torch.zeros(2, hidden, inner)
    if not as_modelled:  # as published
        gate_up, down = gate_up.transpose(1, 2).contiguous(), down.transpose(1, 2).contiguous()
    layer = "model.language_model.layers.0."
    save_file({f"{layer}input_layernorm.weight": torch.zeros(hidden)}, tmp_path / "model-1.safetensors")
    experts = {f"{layer}mlp.experts.gate_up_proj": gate_up, f"{layer}mlp.experts.down_proj": down}
    save_file(experts, tmp_path / "model-2.safetensors")
    assert experts_as_modelled(tmp_path) == as_modelled
