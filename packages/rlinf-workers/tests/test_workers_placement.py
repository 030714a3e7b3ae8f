"""Where a model's tensors lie."""

import torch
from transformers import AutoModelForCausalLM

from rlinf_comm.testing import assert_bitwise_equal
from rlinf_workers.models.language_model import build_model
from rlinf_workers.models.placement import ALIGNMENT_BYTES
from rlinf_workers.testing.engines import tiny_model


def test_weights_of_a_file_begin_where_all_others_do(tmp_path):
    """In a mapped file they begin anywhere, and products of a few rows have other last bits there: the first step of a
    resumed run would differ from that of a run that went on."""
    settings = tiny_model(tmp_path)
    mapped = AutoModelForCausalLM.from_pretrained(tmp_path, local_files_only=True)
    assert any(parameter.data_ptr() % ALIGNMENT_BYTES for parameter in mapped.parameters()), "nothing to align"
    model = build_model(settings, torch.device("cpu"))
    assert not any(tensor.data_ptr() % ALIGNMENT_BYTES for tensor in (*model.parameters(), *model.buffers()))
    for name, parameter in mapped.named_parameters():
        assert_bitwise_equal(model.get_parameter(name).detach(), parameter.detach(), name)
