"""Ways in which vLLM was seen to serve other weights than it was sent, without an error; done to a running vLLM. The
tokens are wrong, and RLinf refuses to serve them, by name."""

from dataclasses import replace
from unittest import mock

import pytest
import torch

from faults import FaultyEngine
from rlinf_comm import WeightMismatchError
from rlinf_workers.engines.vllm import arguments
from rlinf_workers.models.language_model import build_model
from rlinf_workers.testing.architectures import tiny_architecture
from trained_engine import SIZES, compare_tokens, make_engine


def test_experts_that_vllms_own_reload_loses_are_refused(tmp_path):
    """vLLM 0.32.0 on a CPU reorders experts for its kernels when it loads them; a reload reports success, and copies
    the new ones over them as they are."""
    settings = tiny_architecture("qwen3_moe", tmp_path / "start", **SIZES["vllm"])
    model, generator = build_model(settings, torch.device("cpu")), torch.Generator().manual_seed(1)
    for folder in ("start", "new"):
        for parameter in model.parameters():
            parameter.data.normal_(0, 0.14, generator=generator).add_(float(parameter.dim() == 1))
        model.save_pretrained(tmp_path / folder)
    own = {"worker_extension_cls": "broken_extension.OwnWay"}
    with mock.patch.dict(arguments.FIXED, own), mock.patch.object(arguments, "PLAIN", "auto"):
        engine = make_engine("vllm", replace(settings, has_weights=True), 1)
    server = engine._server
    server.run(server.engine.collective_rpc("reload_weights", args=(None, str(tmp_path / "new"))))
    engine.weights_received(1)
    assert compare_tokens(engine, model, 1).worst_distance > 0.1, "vLLM reloads experts correctly by now"
    with pytest.raises(Exception, match=r"model\.layers\.0\.mlp\.experts.*from copies of their weights"):
        server.run(server.engine.collective_rpc("rlinf_check"))
    engine.close()


def test_weights_that_come_back_from_before_a_sync_are_refused_at_the_second_sync(tmp_path, monkeypatch):
    """vLLM sleeps between turns, and a wake brings back the weights of its start over those of the last sync: right
    after the first turn, nonsense after the second."""
    trained = FaultyEngine("qwen2", tmp_path, engine="vllm")
    monkeypatch.setattr(trained.engine, "_gives_memory_back", True)
    server = trained.engine._server
    trained.model.save_pretrained(tmp_path / "start")
    trained.serve()
    trained.engine.offload()
    trained.engine.onload()
    assert trained.compare_tokens().holds
    trained.serve()
    trained.engine.offload()
    server.run(server.engine.collective_rpc("rlinf_load", args=(str(tmp_path / "start"),)))
    with pytest.raises(
        WeightMismatchError, match=r"does not serve the weights that it had: model\.embed_tokens"
    ) as raised:
        trained.engine.onload()
    assert set(raised.value.tensors) == {name for rank in trained.layout.ranks for name in rank.buffers}
    trained.close()


def test_a_layer_that_a_sync_leaves_out_is_refused_at_that_sync(tmp_path):
    """As a vision tower, or a head, that a loader did not know by its name."""
    trained = FaultyEngine("qwen2", tmp_path, engine="vllm")
    trained.serve()
    name = "model.layers.1.mlp.gate_up_proj.weight"
    with trained.lying(f"skip {name}"):
        trained.publish()
        check = trained.fill()
    trained.engine.weights_received(trained.version)
    assert not trained.compare_tokens().holds, "the layer does not matter"
    with pytest.raises(WeightMismatchError, match=rf"version {trained.version}") as raised:
        check()
    assert set(raised.value.tensors) == {f"model.layers.1.mlp.{part}_proj.weight" for part in ("gate", "up")}
    trained.close()
