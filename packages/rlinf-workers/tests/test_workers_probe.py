"""Engine and actor against a plain forward, architecture by architecture, beyond every window."""

import pytest
from benchmarks.models.every_architecture import model_types, verdict_on
from transformers import AutoConfig

from rlinf_workers.engines.huggingface import engine as huggingface, masks
from rlinf_workers.models.small_copy import NoSmallCopy, small_config, small_model
from rlinf_workers.roles.language.probe import BOUND, WAYS, probe_architecture, probe_refusal

EVERY_WAY = frozenset(WAYS) - {"replay"}
REFILLED = EVERY_WAY - {"packed"}
BATCHES = frozenset({"engine", "actor"})
ARCHITECTURES = {
    "qwen2": EVERY_WAY,
    "qwen2 with windows": EVERY_WAY,
    "mistral": EVERY_WAY,
    "gemma2": BATCHES | {"packed"},
    "gemma3_text": EVERY_WAY,
    "phi3": EVERY_WAY,
    "gpt_oss": BATCHES,
    "olmo3": EVERY_WAY,
    "cohere2": EVERY_WAY,
    "starcoder2": EVERY_WAY,
    "exaone4": EVERY_WAY,
    "llama4_text": REFILLED,
    "gpt_neo": BATCHES,
    "mpt": BATCHES,
    "qwen3_moe": EVERY_WAY | {"replay"},
}
"""Architecture -> the ways that are promised."""
CHANGES = {
    "qwen2 with windows": {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 1},
    "phi3": {"sliding_window": 2047},
    "starcoder2": {"sliding_window": 4096},
    "exaone4": {"sliding_window": 4096},
}


def config_of(name):
    return AutoConfig.for_model(name.split()[0], **CHANGES.get(name, {}))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_an_architecture_is_computed_as_transformers_does(name):
    probes = probe_architecture(config_of(name), sorted(ARCHITECTURES[name]))
    assert {way: probe.reason for way, probe in probes.items() if not probe.is_right} == {}


def test_a_mask_without_windows_is_noticed(monkeypatch):
    """What the engine did before: every layer of a model with windows got the causal mask of all keys."""

    def full_mask(*, mask_function, **arguments):
        return masks._whole_mask(mask_function=masks.causal_mask_function, **arguments)

    def full_masks():
        return masks._replaced("sdpa", full_mask)

    monkeypatch.setattr(huggingface, "whole_masks", full_masks)
    probe = probe_architecture(config_of("mistral"), ["engine"])["engine"]
    assert not probe.is_right and probe.largest is not None and probe.largest > 100 * BOUND
    assert "nats off" in str(probe.reason)


@pytest.mark.parametrize(("name", "says"), [("llama4_text", "nats off"), ("gpt_neo", "0 of 2 layers kept")])
def test_sequences_are_not_packed_for_layers_that_attend_in_another_way(name, says):
    """Llama 4 has chunks, which packed attention does not know; GPT-Neo's layers do not call the attention function."""
    reason = probe_refusal(config_of(name), ["packed"], num_tokens=40)
    assert reason is not None and reason.startswith("the actor with packed sequences computes it wrongly: ")
    assert says in reason and reason.endswith("leave max_tokens_per_micro_batch out")
    assert probe_refusal(config_of(name), ["actor"], num_tokens=40) is None


@pytest.mark.parametrize(
    ("name", "says"), [("qwen2", "has no routers"), ("phimoe", "with one call of torch.topk, and one made 0")]
)
def test_experts_are_not_replayed_by_other_routers(name, says):
    reason = probe_refusal(config_of(name), ["replay"], num_tokens=40)
    assert reason is not None and says in reason and reason.endswith("leave actor.router_replay out")


def test_a_small_copy_keeps_kinds_of_layers_and_shrinks_their_windows():
    small = small_config(AutoConfig.for_model("gemma3_text"))
    assert set(small.layer_types) == {"sliding_attention", "full_attention"} and small.sliding_window == 6
    assert small.num_hidden_layers == len(small.layer_types) == 6
    assert small_model(small).num_parameters() < 200_000


def test_a_config_that_does_not_shrink_is_no_architecture_that_was_tried():
    with pytest.raises(NoSmallCopy, match="does not shrink"):
        small_config(AutoConfig.for_model("xlnet"))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_every_architecture_of_transformers_is_computed_as_it_does_or_refused():
    """With other weights than a run's own check has. What `python -m benchmarks.models.architectures` writes."""
    first = {model_type: verdict_on(model_type) for model_type in model_types()}
    taken = [model_type for model_type, verdict in first.items() if verdict.refused is None]
    assert len(taken) > len(first) / 2 and {"falcon_h1", "jamba", "mamba", "rwkv", "qwen3_next"}.isdisjoint(taken)
    again = {model_type: verdict_on(model_type, seed=11) for model_type in taken}
    assert {model_type: verdict.refused for model_type, verdict in again.items() if verdict.refused is not None} == {}
