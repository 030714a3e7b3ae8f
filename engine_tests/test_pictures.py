"""Models that see, in SGLang or vLLM, whichever the venv has: tokens are those of transformers for the same pixels,
placeholders and positions, and a vision tower that was not updated is named before a prompt is taken."""

import random
from dataclasses import replace

import pytest
import torch

from faults import FaultyEngine, Verdict, flip_on_the_way, flip_served, lies
from rlinf_comm import WeightMismatchError
from rlinf_workers.engines import SamplingSettings
from rlinf_workers.engines.huggingface.engine import HuggingFaceEngine
from rlinf_workers.engines.vllm.requests import prompt_input
from rlinf_workers.models.language_model import LoadedModel
from rlinf_workers.models.lora_settings import LoraSettings
from rlinf_workers.testing.pictures import IMAGE, prompt_with_pictures
from served_checks import ENGINE
from trained_engine import LOGPROB_BOUND, TrainedEngine, plain_logits

NUM_SYNCS = 6
NUM_FLIPS = 20
SIZES = [[(1, 1)], [(2, 3), (1, 2)], [], [(3, 1)], [(5, 3)], [(1, 4), (3, 2), (1, 1)], []]
SIZES += [[(2, 2, 1)], [(2, 1, 2), (2, 1), (1, 1, 2)]]
"""Rows and columns of the pictures of each prompt, behind the groups of frames of a video; some are text alone."""
CAUGHT = Verdict(caught=True, names_tensors=True, names_process=True, names_version=True)


def prompts_of(model):
    return [prompt_with_pictures(model, index, sizes) for index, sizes in enumerate(SIZES)]


def all_completions(engine, prompts, sampling):
    """(Prompt, member) -> tokens and log-probabilities."""
    engine.submit(prompts, sampling, seed=0, step=0)
    return taken(engine)


def taken(engine):
    answers = {}
    while finished := engine.finished():
        for part in finished:
            for row, member in enumerate(part.members):
                length = int(part.loss_mask[row].sum())
                answers[part.index, member] = part.token_ids[row, :length], part.logprobs[row, :length]
    return answers


GREEDY = SamplingSettings(group_size=1, max_new_tokens=8, temperature=0.0)


ALL = ("all-linear",)
MODELS = [
    ("qwen2_5_vl", 1, ()),
    ("qwen3_vl", 1, ()),
    ("qwen3_vl_moe", 1, ()),
    ("qwen2_5_vl", 2, ()),
    ("qwen3_vl", 2, ()),
]
MODELS += [("qwen3_vl", 1, ("q_proj", "v_proj", "up_proj", "down_proj")), ("qwen2_5_vl", 1, ALL), ("qwen3_vl", 2, ALL)]
if ENGINE == "vllm":
    MODELS += [("smolvlm", 1, ()), ("smolvlm", 2, ()), ("smolvlm", 1, ALL)]
"""Architecture, processes, and the layers of an adapter, of the decoder alone or of the tower too; none: all weights
are trained."""
TOWERS = {
    "qwen3_vl": ("visual.", {"visual.blocks.1.attn.qkv.weight": 1, "visual.merger.linear_fc2.bias": 1}),
    "smolvlm": (
        ("model.vision_model.", "model.connector."),
        {
            "model.vision_model.encoder.layers.1.self_attn.qkv_proj.weight": 3,
            "model.connector.modality_projection.proj.weight": 1,
        },
    ),
}
ADAPTED_TOWERS = {
    "qwen2_5_vl": ("visual.", {"visual.blocks.1.attn.qkv.lora_A": 1, "visual.blocks.1.mlp.gate_up_proj.lora_B": 2}),
    "smolvlm": (
        TOWERS["smolvlm"][0],
        {
            "model.vision_model.encoder.layers.1.self_attn.qkv_proj.lora_A": 3,
            "model.connector.modality_projection.proj.lora_B": 1,
        },
    ),
}
"""Beginnings of the names of a tower's parameters, and some of these -> how many tensors each has."""


def lora_of(*targets):
    return LoraSettings(rank=4, alpha=6.0, targets=targets, base_digest="") if targets else None


@pytest.mark.parametrize(("name", "tp", "targets"), MODELS)
def test_tokens_are_those_of_the_engine_huggingface_after_every_sync(name, tp, targets, tmp_path):
    """Pictures of odd sizes, several in a prompt, in one batch with prompts that are text alone. Every sync changes the
    vision tower too, or its adapter. Log-probabilities are those of transformers with the adapter merged."""
    trained = TrainedEngine(name, tmp_path, tp=tp, engine=ENGINE, adapter=lora_of(*targets))
    prompts = prompts_of(trained.model)
    loaded = LoadedModel(model=trained.model, tokenizer=None, stop_ids=(1,), pad_id=0)
    for _ in range(NUM_SYNCS):
        assert trained.compare_tokens(prompts).holds
        reference = HuggingFaceEngine(loaded, torch.device("cpu"), max_prompt_tokens=48)
        expected = {key: tokens.tolist() for key, (tokens, _) in all_completions(reference, prompts, GREEDY).items()}
        own = all_completions(trained.engine, prompts, GREEDY)
        assert {key: tokens.tolist() for key, (tokens, _) in own.items()} == expected
        trained.serve()
    assert trained.compare_tokens(prompts).holds
    trained.close()


@pytest.fixture(scope="module", params=[*TOWERS] if ENGINE == "vllm" else ["qwen3_vl"])
def seeing(request, tmp_path_factory):
    """A model whose loader may be broken."""
    engine = FaultyEngine(request.param, tmp_path_factory.mktemp("seeing"), engine=ENGINE)
    engine.serve()
    yield engine
    engine.close()


@torch.no_grad()
def logprobs_of(trained, prompt, tokens):
    """Of one plain forward pass of transformers."""
    return plain_logits(trained.model, prompt, tokens).log_softmax(-1).gather(-1, tokens[:, None])[:, 0]


def check_logprobs(trained, prompts, answers):
    for (index, _), (tokens, logprobs) in answers.items():
        assert (logprobs - logprobs_of(trained, prompts[index], tokens)).abs().max() < LOGPROB_BOUND, f"prompt {index}"


def test_equal_tokens_with_another_picture_are_another_prompt(seeing):
    """The prefix cache has the tokens of the first prompt, and their placeholders."""
    prompts = [prompt_with_pictures(seeing.model, index, [(2, 2), (5, 3)], num_words=12) for index in range(3)]
    assert len(prompts[0].token_ids) > 32, "a whole block of the cache"
    assert torch.equal(prompts[0].token_ids, prompts[1].token_ids)
    answers = {}
    for prompt in prompts:
        answers |= all_completions(seeing.engine, [prompt], GREEDY)
    check_logprobs(seeing, prompts, answers)
    assert not torch.equal(answers[0, 0][1][:1], answers[1, 0][1][:1]), "the picture does not matter"


@pytest.mark.skipif(ENGINE != "vllm", reason="of vLLM's core process")
def test_pixels_go_to_the_core_process_once_for_a_group(seeing, monkeypatch):
    """Also for a later prompt with the same picture."""
    first = prompt_with_pictures(seeing.model, 40, [(2, 2), (5, 3)], num_words=12)
    later = prompt_with_pictures(seeing.model, 40, [(2, 2)], num_words=3)
    assert later.pictures.pictures[0].digest == first.pictures.pictures[0].digest
    cache, sent = seeing.engine._server.engine.input_processor.renderer.mm_processor_cache, []
    replace_item = cache.get_and_update_item

    def counted(item, digest):
        left = replace_item(item, digest)
        sent.append(left[0] is not None)
        return left

    monkeypatch.setattr(cache, "get_and_update_item", counted)
    answers = all_completions(seeing.engine, [first], replace(GREEDY, group_size=4))
    assert len(sent) == 8 and sum(sent) == 2
    answers |= all_completions(seeing.engine, [replace(later, index=1)], GREEDY)
    assert sent[8:] == [False]
    check_logprobs(seeing, {40: first, 1: later}, answers)


@pytest.mark.skipif(ENGINE != "vllm", reason="of vLLM's core process")
def test_a_picture_that_the_core_process_has_dropped_is_sent_again(seeing):
    prompt = prompt_with_pictures(seeing.model, 41, [(3, 2)])
    picture = prompt.pictures.pictures[0]
    sent = seeing.engine._server.engine.input_processor.renderer.mm_processor_cache
    sent.get_and_update_item(
        (prompt_input(prompt, prompt.token_ids.tolist(), {"image": IMAGE})["mm_kwargs"]["image"][0], []), picture.digest
    )
    assert sent.is_cached_item(picture.digest), "so the first request has no pixels"
    check_logprobs(seeing, {41: prompt}, all_completions(seeing.engine, [prompt], GREEDY))


def test_new_weights_compute_the_pictures_of_completions_in_flight_again(seeing):
    """A group shares its prompt's pictures in the server's caches, which the new weights empty."""
    prompts = [prompt_with_pictures(seeing.model, 0, [(2, 2), (5, 3)], num_words=12)]
    sampling = replace(GREEDY, group_size=4, max_new_tokens=60)
    all_completions(seeing.engine, prompts, GREEDY)
    seeing.engine.submit(prompts, sampling, seed=0, step=0)
    before = seeing.engine.pause("recompute")
    seeing.serve()
    seeing.engine.resume()
    seeing.engine.submit(prompts_of(seeing.model)[1:3], GREEDY, seed=0, step=0)
    parts = before
    while finished := seeing.engine.finished():
        parts += finished
    assert all(part.token_ids.numel() for part in parts) and sum(len(part.members) for part in parts) == 6
    for part in (part for part in parts if part.index == 0):
        for row, segments in enumerate(part.segments):
            if segments[-1].policy_version == seeing.version:
                length, num_new = int(part.loss_mask[row].sum()), segments[-1].num_tokens
                logprobs = logprobs_of(seeing, prompts[0], part.token_ids[row, :length])
                assert (part.logprobs[row, :length] - logprobs)[-num_new:].abs().max() < LOGPROB_BOUND
    check_logprobs(seeing, prompts, all_completions(seeing.engine, prompts, GREEDY))


def test_tokens_that_are_not_those_of_the_pictures_are_refused(seeing):
    prompt = prompt_with_pictures(seeing.model, 0, [(2, 2)])
    seeing.engine.submit([replace(prompt, token_ids=prompt.token_ids.flip(0))], GREEDY, seed=0, step=0)
    with pytest.raises(ValueError, match=r"prompt 0: tokens \d+ to \d+ are not those of the picture"):
        seeing.engine.finished()
    seeing.engine._capacity.end(0, 0, 1)


def test_a_tower_that_is_not_the_published_one_is_named(seeing):
    check_names(seeing, *TOWERS[seeing.model.config.model_type])


@pytest.mark.parametrize("name", ["qwen2_5_vl", "smolvlm"] if ENGINE == "vllm" else ["qwen2_5_vl"])
def test_an_adapter_of_a_tower_that_is_not_the_published_one_is_named(name, tmp_path):
    adapted = FaultyEngine(name, tmp_path, engine=ENGINE, adapter=lora_of(*ALL))
    adapted.serve()
    check_names(adapted, *ADAPTED_TOWERS[name])
    adapted.close()


def check_names(seeing, beginnings, examples):
    """Tensors not updated, flipped bits in what is served and on the way, each followed by a correct sync."""
    for name, count in examples.items():
        tensors = {block.name for block in seeing.layout.ranks[0].blocks if block.buffer == name}
        assert len(tensors) == count
        with seeing.lying(f"skip {name}"):
            seeing.publish()
            check = seeing.fill()
        with pytest.raises(WeightMismatchError, match=r"model\.(visual|vision_model|connector)\..* differ") as raised:
            check()
        assert set(raised.value.tensors) == tensors
        seeing.serve()
    choose = random.Random(7)
    flips = [fault for _ in range(NUM_FLIPS) for fault in (flip_served(seeing, choose), flip_on_the_way())]
    of_tower = [fault for fault in lies(seeing) if fault.line.partition(" ")[2].startswith(beginnings)]
    for fault in [*flips, *of_tower]:
        assert seeing.attempt(fault, choose) == CAUGHT, fault
        seeing.recover(fault)
    assert seeing.compare_tokens(prompts_of(seeing.model)).holds
