"""The backend `megatron` on two ranks against transformers' model, torch's AdamW and `replicated`."""

import math
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from test_workers_router_replay import random_prompts, sampled
from workers_megatron_ranks import (
    ADAMW,
    LORA,
    NUM_SHARDS,
    Ranks,
    across_put_aside,
    go_on,
    pipeline,
    sharing_put_aside,
    study,
    write_adapter,
    write_critic,
    write_models,
)

from rlinf_algos import path_of
from rlinf_comm.weights import Layout, execute, layouts, reshard_plan, specs_of
from rlinf_comm.weights.layouts import TransformerShape
from rlinf_sched.derive import JobShape, Lengths, ModelShape, find_gpu, find_model
from rlinf_workers.launchers.local.launcher import LocalLauncher
from rlinf_workers.models.in_memory import renamed
from rlinf_workers.models.language_model import load_model
from rlinf_workers.models.lora import LoraModel, first_adapter
from rlinf_workers.models.trainable import TokenModel
from rlinf_workers.plugins import OptionError
from rlinf_workers.testing.backends import Chooser, trial_worker
from rlinf_workers.testing.language_backends import LanguageSubject, ValueSubject
from rlinf_workers.testing.launchers import launched, start
from rlinf_workers.trainers.megatron.make import megatron
from rlinf_workers.trainers.megatron.memory import micro_batch_pass, parameters_of_rank
from rlinf_workers.trainers.megatron.options import MegatronOptions
from rlinf_workers.trainers.megatron.spec import SPEC
from rlinf_workers.trainers.megatron.storages import Storages
from rlinf_workers.trainers.replicated.backend import ReplicatedBackend

pytest.importorskip("megatron.core")  # tools/environment.sh installs it
pytestmark = pytest.mark.usefixtures("forked_workers")
NUM_STEPS = 5
ACROSS = {"tensor_parallel": 2}
SHARED = {"tensor_parallel": 2, "sequence_parallel": True}
CASES = {
    "TP2": ("qwen2", 2, ACROSS),
    "TP2 SP": ("qwen3", 2, SHARED),
    "PP2, tied, recomputed": ("qwen2_tied", 2, {"pipeline_parallel": 2, "recompute": True}),
    "EP2": ("qwen3_moe", 2, {"expert_parallel": 2}),
    "TP2 EP2": ("qwen3_moe", 2, {**SHARED, "expert_parallel": 2}),
    "DP2, distributed optimizer": ("qwen2", 1, {"distributed_optimizer": True}),
}
MORE = {
    "DP2": ("qwen2", 1, {}),
    "TP2, tied": ("qwen2_tied", 2, ACROSS),
    "TP2, experts": ("qwen3_moe", 2, SHARED),
    "PP2, experts": ("qwen3_moe", 2, {"pipeline_parallel": 2}),
    "EP2, distributed optimizer": ("qwen3_moe", 2, {"expert_parallel": 2, "distributed_optimizer": True}),
    "TP2 recomputed": ("qwen2", 2, {**ACROSS, "recompute": True}),
}
PACKED = {
    "DP2, distributed optimizer": CASES["DP2, distributed optimizer"],
    "TP2 SP": CASES["TP2 SP"],
    "PP2, tied, recomputed": CASES["PP2, tied, recomputed"],
    "CP2": ("qwen3", 2, {"context_parallel": 2}),
    "CP2, tied, recomputed, distributed optimizer": (
        "qwen2_tied",
        2,
        {"context_parallel": 2, "recompute": True, "distributed_optimizer": True},
    ),
    "EP2": CASES["EP2"],
    "CP2, experts": ("qwen3_moe", 2, {"context_parallel": 2}),
}
REPLAYED = {
    "EP2": CASES["EP2"],
    "TP2 EP2": CASES["TP2 EP2"],
    "PP2, recomputed": ("qwen3_moe", 2, {"pipeline_parallel": 2, "recompute": True}),
    "DP2, distributed optimizer": ("qwen3_moe", 1, {"distributed_optimizer": True}),
    "TP2 EP2, groups of experts": ("deepseek_v3", 2, {**SHARED, "expert_parallel": 2}),
}
GLM = {
    "TP2 EP2": ("glm4_moe", 2, {**SHARED, "expert_parallel": 2}),
    "TP2": ("glm4_moe", 2, SHARED),
    "PP2, recomputed": ("glm4_moe", 2, {"pipeline_parallel": 2, "recompute": True}),
    "EP2, distributed optimizer": ("glm4_moe", 2, {"expert_parallel": 2, "distributed_optimizer": True}),
    "DP2": ("glm4_moe", 1, {}),
}
DEEPSEEK = {
    "TP2 EP2": ("deepseek_v3", 2, {**SHARED, "expert_parallel": 2}),
    "TP2": ("deepseek_v3", 2, SHARED),
    "PP2, recomputed": ("deepseek_v3", 2, {"pipeline_parallel": 2, "recompute": True}),
    "EP2, distributed optimizer": ("deepseek_v3", 2, {"expert_parallel": 2, "distributed_optimizer": True}),
    "CP2": ("deepseek_v3", 2, {"context_parallel": 2}),
    "DP2": ("deepseek_v3", 1, {}),
    "TP2, without a latent query": ("deepseek_v3_lite", 2, SHARED),
}
VIRTUAL_PIPELINE = {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2}
VIRTUAL = {
    "PP2 VPP2": ("qwen3_deep", 2, VIRTUAL_PIPELINE),
    "PP2 VPP2, tied, recomputed": ("qwen2_tied_deep", 2, {**VIRTUAL_PIPELINE, "recompute": True}),
    "PP2 VPP2, experts": ("qwen3_moe_deep", 2, VIRTUAL_PIPELINE),
}
DEEPSEEK_BY_DEFAULT = (("TP2 EP2", "padded"), ("PP2, recomputed", "packed"), ("CP2", "packed"))
KIND_GLM, DEEP = {"model_type": "glm4_moe"}, {"model_type": "deepseek_v3"}
ADAPTED = {
    "PP2 VPP2": VIRTUAL["PP2 VPP2"],
    "GLM, TP2 EP2": GLM["TP2 EP2"],
    "DeepSeek, TP2 EP2": DEEPSEEK["TP2 EP2"],
}
SHARED_ROWS = ("CP2, experts", "TP2 SP", "PP2, tied, recomputed")
"""Packed rows of every run of the tests."""
ADAPTED_BY_DEFAULT = ("PP2, tied, recomputed",)
FOUR = {
    "CP4, tied": ("qwen2_tied", 4, {"context_parallel": 4}),
    "DP2 CP2, distributed optimizer": ("qwen3", 2, {"context_parallel": 2, "distributed_optimizer": True}),
    "TP2 CP2": ("qwen2", 4, {**ACROSS, "context_parallel": 2}),
    "TP2 SP CP2 EP2": ("qwen3_moe", 4, {**SHARED, "context_parallel": 2, "expert_parallel": 2}),
    "CP2 EP4": ("qwen3_moe", 4, {"context_parallel": 2, "expert_parallel": 4}),
    "DP2 PP2 VPP2, distributed optimizer": ("qwen3_deep", 2, {**VIRTUAL_PIPELINE, "distributed_optimizer": True}),
    "PP2 VPP2 TP2 EP2": ("qwen3_moe_deep", 4, {**VIRTUAL_PIPELINE, **SHARED, "expert_parallel": 2}),
    "PP2 CP2, recomputed": ("qwen3", 4, {"pipeline_parallel": 2, "context_parallel": 2, "recompute": True}),
}
"""Of four ranks, with packed rows."""
EIGHT = {
    "DP2 PP2 CP2": ("qwen3", 4, {"pipeline_parallel": 2, "context_parallel": 2, "distributed_optimizer": True}),
    "DP2 PP2 CP2 EP2": ("qwen3_moe", 4, {"pipeline_parallel": 2, "context_parallel": 2, "expert_parallel": 2}),
    "DP2 PP2 EP2": ("qwen3_moe", 4, {"pipeline_parallel": 2, "expert_parallel": 2, "distributed_optimizer": True}),
}
"""Replicas of a pipeline whose stages have slices."""


def stored(folder: Path, stem: str) -> dict[str, torch.Tensor]:
    """The tensors of files that several ranks wrote."""
    tensors = {}
    for path in folder.glob(f"{stem}*.safetensors"):
        tensors |= load_file(path)
    return tensors


def worst(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> tuple[float, str]:
    """The largest difference, as a share of its tensor's largest number."""
    assert tensors.keys() == expected.keys()
    differences = ((tensors[name] - tensor).abs().max() / tensor.abs().max() for name, tensor in expected.items())
    return max(zip(map(float, differences), expected, strict=True))


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_models(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def critics(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("critics")
    return {name: write_critic(model, folder / name) for name, model in models.items()}


@pytest.fixture(scope="module")
def references(models, critics, tmp_path_factory):
    """What one rank of `replicated` makes of a model or its critic in so many steps, and in which folder its files
    are."""
    studies = {}

    def reference(
        name: str, num_steps: int, critic: bool = False, replays: bool = False, adapter: str | None = None
    ) -> tuple[dict, Path]:
        key = name, num_steps, critic, replays, adapter
        if key not in studies:
            folder = tmp_path_factory.mktemp(name)
            which = {"num_steps": num_steps, "critic": critics[name] if critic else None}
            which |= {"packs": replays, "replays": replays, "adapter": adapter}
            studies[key] = study(ReplicatedBackend, trial_worker(), models[name], str(folder), **which), folder
        return studies[key]

    return reference


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """Two ranks, which are one replica or two as a test wants them."""
    with launched(LocalLauncher) as launcher:
        yield start(launcher, tmp_path_factory.mktemp("ranks"), Ranks, num_ranks=2)


@pytest.fixture(scope="module")
def four_ranks(tmp_path_factory):
    with launched(LocalLauncher) as launcher:
        yield start(launcher, tmp_path_factory.mktemp("ranks"), Ranks, num_ranks=4)


@pytest.fixture(scope="module")
def eight_ranks(tmp_path_factory):
    with launched(LocalLauncher) as launcher:
        yield start(launcher, tmp_path_factory.mktemp("ranks"), Ranks, num_ranks=8)


def check_case(
    case,
    num_steps: int,
    ranks,
    models,
    references,
    folder: Path,
    critic: str | None = None,
    *,
    packs: bool = False,
    replays: bool = False,
    adapter: str | None = None,
) -> list[dict]:
    """The reference computes padded micro-batches, except with `replays`."""
    name, per_replica, options = case
    expected, there = references(name, num_steps, critic is not None, replays, adapter)
    how = options, critic, packs, replays, adapter
    bound = 1e-4 if adapter else 1e-5  # gradients of A and B are sums of small terms of both signs
    studies = ranks.call("study", models[name], str(folder), per_replica, num_steps, *how)
    for rank in studies:
        assert rank["answers"].keys() == expected["answers"].keys()
        for answer, expected_numbers in expected["answers"].items():
            difference = torch.tensor(rank["answers"][answer]) - torch.tensor(expected_numbers)
            assert not difference.numel() or difference.abs().max() <= 2e-6, (answer, difference.abs().max())
        assert rank["norms"] == pytest.approx(expected["norms"], rel=bound)
        num_compared = 2 if "pipeline_parallel" in options else 3  # the last stage has the agreement of its layers
        for sums, expected_numbers in zip(rank["statistics"], expected["statistics"], strict=True):
            assert sums[:num_compared] == pytest.approx(expected_numbers[:num_compared], rel=1e-5)
    model = "adapter_model" if adapter else "model"
    before, after = stored(Path(critic or adapter or models[name].folder), model), stored(folder / "unchanged", model)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[key].view(torch.int32), tensor.view(torch.int32)) for key, tensor in before.items())
    for files, stem in (("gradient", "optimizer"), ("trained", model), ("trained", "optimizer")):
        difference = worst(stored(folder / files, stem), stored(there / files, stem))
        assert difference[0] <= bound, (files, stem, difference)
    return studies


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_ranks_compute_and_learn_what_one_does(case, ranks, models, references, tmp_path):
    check_case(case, NUM_STEPS, ranks, models, references, tmp_path)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if name == "TP2 SP" else pytest.mark.slow) for name, case in CASES.items()],
    ids=CASES,
)
def test_a_critic_does_too(case, ranks, models, critics, references, tmp_path):
    check_case(case, NUM_STEPS, ranks, models, references, tmp_path, critics[case[0]])


@pytest.mark.parametrize(
    ("case", "packs"),
    [
        pytest.param(case, packs, id=f"{name}, {how}", marks=() if packs != ("tied" in name) else pytest.mark.slow)
        for name, case in VIRTUAL.items()
        for how, packs in (("padded", False), ("packed", True))
    ],
)
def test_chunks_of_a_virtual_pipeline_learn_what_one_rank_does(case, packs, ranks, models, references, tmp_path):
    """Also where micro-batches are no multiple of the stages, as a single forward pass."""
    check_case(case, NUM_STEPS, ranks, models, references, tmp_path, packs=packs)


def whole(folder: Path, layout: Layout, stem: str) -> dict[str, torch.Tensor]:
    """The tensors of which each rank wrote a part."""
    parts = [load_file(folder / f"{stem}-{rank}.safetensors") for rank in range(layout.num_ranks)]
    target = Layout.replicated(layout.specs, 1)
    tensors = {name: torch.zeros(spec.shape) for name, spec in layout.specs.items()}
    execute(reshard_plan(layout, target), parts, [tensors])
    return tensors


def check_adapter(case, num_steps, ranks, models, adapters, references, folder, **how) -> None:
    """As `check_case`, and what servers receive, merged and not."""
    studies = check_case(case, num_steps, ranks, models, references, folder, adapter=adapters[case[0]], **how)
    expected, there = references(case[0], num_steps, adapter=adapters[case[0]])
    for stem, layout in studies[0]["served"].items():
        served = whole(folder, layout, f"served-{stem}")
        difference = worst(served, whole(there, expected["served"][stem], f"served-{stem}"))
        assert difference[0] <= 1e-4, (stem, difference)


@pytest.fixture(scope="module")
def adapters(models, tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    names = {case[0] for case in (*CASES.values(), *MORE.values(), *ADAPTED.values())}
    return {name: write_adapter(models[name], folder / name) for name in names}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if name in ADAPTED_BY_DEFAULT else pytest.mark.slow)
        for name, case in (CASES | MORE | ADAPTED).items()
    ],
)
def test_adapters_learn_what_those_of_one_rank_do(case, ranks, models, adapters, references, tmp_path):
    check_adapter(case, NUM_STEPS, ranks, models, adapters, references, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("case", [*CASES.values(), PACKED["CP2"]], ids=[*CASES, "CP2"])
def test_adapters_in_twenty_steps_of_packed_rows(case, ranks, models, adapters, references, tmp_path):
    check_adapter(case, 20, ranks, models, adapters, references, tmp_path, packs=True)


def test_an_adapter_begins_as_that_of_other_backends(models):
    lora = replace(LORA, targets=("o_proj", "up_proj"))
    kind = LoraModel(TokenModel(models["qwen3"], 1.0), models["qwen3"], lora)
    backend = ReplicatedBackend(kind, trial_worker(), optimizer=ADAMW, num_shards=1)
    first, built = first_adapter(models["qwen3"], lora), backend.weights(merged=False)
    assert first.keys() == {name for name in built if name.endswith(layouts.LORA_A)}
    assert all(torch.equal(built[name], tensor) for name, tensor in first.items())


@pytest.mark.parametrize("packs", [pytest.param(False, marks=pytest.mark.slow), True], ids=["padded", "packed"])
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=name, marks=() if name == "TP2 EP2" else pytest.mark.slow) for name, case in GLM.items()],
)
def test_glm_with_shared_experts_and_router_biases(case, packs, ranks, models, references, tmp_path):
    check_case(case, NUM_STEPS, ranks, models, references, tmp_path, packs=packs)


@pytest.mark.parametrize(
    ("case", "packs"),
    [
        pytest.param(
            case, packs, id=f"{name}, {how}", marks=() if (name, how) in DEEPSEEK_BY_DEFAULT else pytest.mark.slow
        )
        for name, case in DEEPSEEK.items()
        for how, packs in (("padded", False), ("packed", True))
        if packs or "context_parallel" not in case[2]
    ],
)
def test_deepseek_with_latent_attention_and_groups_of_experts(case, packs, ranks, models, references, tmp_path):
    check_case(case, NUM_STEPS, ranks, models, references, tmp_path, packs=packs)


@pytest.mark.slow
@pytest.mark.parametrize("critic", [False, True], ids=["policy", "critic"])
@pytest.mark.parametrize(
    "case",
    [*GLM.values(), *DEEPSEEK.values(), *VIRTUAL.values()],
    ids=[*(f"glm, {name}" for name in GLM), *(f"deepseek, {name}" for name in DEEPSEEK), *VIRTUAL],
)
def test_twenty_steps_of_glm_deepseek_and_chunks(case, critic, ranks, models, critics, references, tmp_path):
    folder = critics[case[0]] if critic else None
    check_case(case, 20, ranks, models, references, tmp_path, folder, packs=True)


@pytest.mark.slow
@pytest.mark.parametrize("critic", [False, True], ids=["policy", "critic"])
@pytest.mark.parametrize("case", [*CASES.values(), *MORE.values()], ids=[*CASES, *MORE])
def test_twenty_steps(case, critic, ranks, models, critics, references, tmp_path):
    check_case(case, 20, ranks, models, references, tmp_path, critics[case[0]] if critic else None)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=() if name in SHARED_ROWS else pytest.mark.slow)
        for name, case in PACKED.items()
    ],
)
def test_packed_rows_and_ranks_that_share_them_equal_padded_ones(case, ranks, models, references, tmp_path):
    check_case(case, NUM_STEPS, ranks, models, references, tmp_path, packs=True)


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if name == "CP2" else pytest.mark.slow) for name, case in PACKED.items()],
    ids=PACKED,
)
def test_packed_rows_of_a_critic_do_too(case, ranks, models, critics, references, tmp_path):
    check_case(case, NUM_STEPS, ranks, models, references, tmp_path, critics[case[0]], packs=True)


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, id=name, marks=pytest.mark.slow if name.startswith("TP2") else ())
        for name, case in REPLAYED.items()
    ],
)
def test_routers_use_the_experts_of_the_batch(case, ranks, models, references, tmp_path):
    check_case(case, NUM_STEPS, ranks, models, references, tmp_path, packs=True, replays=True)
    (expected, _), (own, _) = (references(case[0], NUM_STEPS, replays=replays) for replays in (True, False))
    assert expected["norms"] != pytest.approx(own["norms"], rel=1e-3), "they are others than the routers'"


def test_with_the_experts_of_the_engine_the_gap_is_rounding(ranks, models):
    groups = sampled(load_model(models["qwen3_moe"]), random_prompts(5, 3, 7))
    for gap, share in ranks.call("replayed", models["qwen3_moe"], *CASES["EP2"][1:], groups):
        assert gap <= 2e-6
        assert share == pytest.approx(1.0), "the weights are the same"


@pytest.mark.parametrize(
    ("case", "packs"),
    [(VIRTUAL["PP2 VPP2"], True), (PACKED["CP2"], False)],
    ids=["packed rows of a pipeline", "slices of padded ones"],
)
def test_an_update_reads_the_device_a_constant_number_of_times(case, packs, ranks, models):
    name, *how = case
    few, many = (ranks.call("device_reads", models[name], *how, packs, num_parts) for num_parts in (1, 5))
    assert few == many, "nothing is read for a micro-batch"


@pytest.mark.parametrize("options", [ACROSS, {"context_parallel": 2}], ids=["TP2", "CP2"])
def test_the_memory_of_ranks_that_share_a_packed_row_is_counted(options, ranks, models):
    """The head is computed for each token of the rank, in two places: its states and its logits."""
    sizes = {"num_prompts": 2, "size": 8, "widths": (8, 40)}
    recorded = ranks.call("kept_bytes", models["qwen2"], 2, options, sizes)
    lengths = Lengths(mean_tokens=40, limit_tokens=40, prompt_tokens=8, group_size=8)
    budget, shape = 2 * (8 + 8 * 40), ModelShape.from_folder(models["qwen2"].folder)
    job = JobShape(lengths=lengths, num_groups=2, max_tokens_per_micro_batch=budget, on_gpu=False)
    counted = micro_batch_pass(shape, job, MegatronOptions(**options))
    words = 16 // options.get("tensor_parallel", 1)
    head = counted.num_tokens * (3 * shape.hidden_size + shape.hidden_size + words) * 4
    for num_bytes in recorded:
        assert (counted.kept_bytes + head) / num_bytes == pytest.approx(1.0, abs=0.08)


def test_chunks_shorten_the_bubble_and_keep_more_micro_batches():
    """Of 4 stages the first keeps 4 micro-batches; with 3 chunks 15 passes of a third of a stage's layers."""
    model, lengths = find_model("Qwen3-8B"), Lengths(mean_tokens=500, limit_tokens=1000, group_size=8)
    options = [MegatronOptions(pipeline_parallel=4, virtual_pipeline_parallel=chunks) for chunks in (1, 3, 9)]
    jobs = [
        JobShape(lengths=lengths, num_groups=64, num_updates=2, trainer_options=asdict(one), on_gpu=True)
        for one in options
    ]
    one, three, nine = (SPEC.train_profile(model, find_gpu("H100"), job).instances[0].step_s for job in jobs)
    assert (one - three) / (one - nine) == pytest.approx((1 - 1 / 3) / (1 - 1 / 9))
    passes = [micro_batch_pass(model, job, cut) for job, cut in zip(jobs, options, strict=True)]
    inside = passes[0].peak_bytes(16) - 4 * passes[0].kept_bytes
    assert passes[1].peak_bytes(16) == pytest.approx((4 + 2 + 9) / 3 * passes[1].kept_bytes + inside, rel=1e-6)


def test_layers_that_stages_do_not_divide_are_counted_by_stage():
    """61 layers as DeepSeek-V3 has; parameters against the layout of each stage."""
    assert MegatronOptions(pipeline_parallel=4).layers_by_chunk(61) == [15, 16, 15, 15]
    assert MegatronOptions(pipeline_parallel=2).layers_by_chunk(61) == [31, 30]
    dealt = MegatronOptions(pipeline_parallel=4, virtual_pipeline_parallel=4)
    assert dealt.layers_by_chunk(61) == [3, *[4] * 13, 3, 3] and dealt.layers_by_stage(61) == [15, 16, 15, 15]
    model, lengths = find_model("DeepSeek-V3"), Lengths(mean_tokens=500, limit_tokens=1000, group_size=8)
    job = JobShape(lengths=lengths, num_groups=64, trainer_options={"pipeline_parallel": 4}, on_gpu=True)
    assert SPEC.model_problem({"pipeline_parallel": 4}, model) is None
    assert SPEC.stage_imbalance(model, job) == pytest.approx(16 / (61 / 4))
    cut = MegatronOptions(pipeline_parallel=3)
    shape = TransformerShape(
        num_layers=5, hidden=64, num_heads=4, num_kv_heads=2, head_dim=16, vocab=512, intermediate=96, dtype="float32"
    )
    layout = layouts.megatron_layout(shape, pp=3, layers_by_stage=cut.layers_by_chunk(5), transformer_engine=False)
    stored = [sum(math.prod(spec.shape) for spec in rank.buffers.values()) for rank in layout.ranks]
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 96}
    more = {"num_hidden_layers": 5, "vocab_size": 512, "head_dim": 16, "tie_word_embeddings": False}
    counted = parameters_of_rank(ModelShape.from_config({"model_type": "qwen3", **sizes, **more}), cut)
    assert sum(counted) == pytest.approx(max(stored), rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("critic", [False, True], ids=["policy", "critic"])
@pytest.mark.parametrize("case", PACKED.values(), ids=PACKED)
def test_twenty_steps_on_packed_rows(case, critic, ranks, models, critics, references, tmp_path):
    folder = critics[case[0]] if critic else None
    check_case(case, 20, ranks, models, references, tmp_path, folder, packs=True)


@pytest.mark.slow
@pytest.mark.parametrize("critic", [False, True], ids=["policy", "critic"])
@pytest.mark.parametrize("case", FOUR.values(), ids=FOUR)
def test_twenty_steps_of_four_ranks(case, critic, four_ranks, models, critics, references, tmp_path):
    folder = critics[case[0]] if critic else None
    check_case(case, 20, four_ranks, models, references, tmp_path, folder, packs=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "packs"),
    [
        pytest.param(case, packs, id=f"{name}, {'packed' if packs else 'padded'}")
        for name, case in EIGHT.items()
        for packs in (False, True)
        if packs or "context_parallel" not in case[2]
    ],
)
def test_replicas_of_pipelines_with_slices(case, packs, eight_ranks, models, references, tmp_path):
    check_case(case, NUM_STEPS, eight_ranks, models, references, tmp_path, packs=packs)


def test_replicas_of_a_pipeline_have_each_expert_once_in_a_stage():
    options = MegatronOptions(pipeline_parallel=2, context_parallel=4, expert_parallel=2)
    options.check_ranks(8, 8, has_experts=True)
    options.check_ranks(16, 8, has_experts=False)
    with pytest.raises(OptionError, match=r"expert_parallel=2: 2 replicas of a pipeline .* use 4, or one replica"):
        options.check_ranks(16, 8, has_experts=True)


@pytest.mark.parametrize(("per_replica", "options"), [(2, ACROSS), (1, {"distributed_optimizer": True})])
def test_bfloat16_has_float32_masters(per_replica, options, ranks, models, references, tmp_path):
    """Files have the masters to the bit; what is computed is as near as 8 bits of mantissa allow."""
    options = {**options, "compute_dtype": "bfloat16"}
    expected, there = references("qwen2", NUM_STEPS)
    studies = ranks.call("study", models["qwen2"], str(tmp_path), per_replica, NUM_STEPS, options, None)
    assert studies[0] == studies[1]
    assert studies[0]["norms"] != pytest.approx(expected["norms"], rel=1e-5)
    assert studies[0]["norms"] == pytest.approx(expected["norms"], rel=0.05)
    before, after = stored(Path(models["qwen2"].folder), "model"), stored(tmp_path / "unchanged", "model")
    assert all(torch.equal(after[key], tensor) for key, tensor in before.items())
    trained, expected_weights = stored(tmp_path / "trained", "model"), stored(there / "trained", "model")
    assert {tensor.dtype for tensor in trained.values()} == {torch.float32}
    assert 1e-5 < worst(trained, expected_weights)[0] < 0.05


def test_router_biases_stay_as_they_are_in_float32(ranks, models, tmp_path):
    options = {**SHARED, "compute_dtype": "bfloat16"}
    ranks.call("study", models["glm4_moe"], str(tmp_path), 2, NUM_STEPS, options, None)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    before, after = stored(Path(models["glm4_moe"].folder), "model")[name], stored(tmp_path / "trained", "model")[name]
    assert torch.equal(before, after)
    assert not torch.equal(before, before.bfloat16().float()), "bfloat16 would show"


def test_replicated_megatron_and_replicated_go_on_from_each_others_files(ranks, models, references, tmp_path):
    """fsdp2 writes what replicated does."""
    model, case = models["qwen3_moe"], CASES["TP2 EP2"]
    start_from = str(references("qwen3_moe", NUM_STEPS)[1] / "trained")
    one, two = str(tmp_path / "one"), str(tmp_path / "two")
    expected = [go_on(ReplicatedBackend, trial_worker(), model, start_from, one, NUM_STEPS)]
    expected.append(go_on(ReplicatedBackend, trial_worker(), model, one, str(tmp_path / "end"), NUM_STEPS + 1))
    updates = ranks.call("go_on", model, start_from, two, NUM_STEPS, case[1], case[2])[:1]
    updates.append(go_on(ReplicatedBackend, trial_worker(), model, two, str(tmp_path / "last"), NUM_STEPS + 1))
    for (sums, norm), (expected_sums, expected_norm) in zip(updates, expected, strict=True):
        assert sums == pytest.approx(expected_sums, rel=1e-6)
        assert norm == pytest.approx(expected_norm, rel=1e-6)


@pytest.mark.parametrize("subject", [LanguageSubject, pytest.param(ValueSubject, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("make", "per_replica"),
    [
        (across_put_aside, 2),
        pytest.param(sharing_put_aside, 1, marks=pytest.mark.slow),
        pytest.param(pipeline, 2, marks=pytest.mark.slow),
    ],
    ids=["TP2", "DP2", "PP2"],
)
def test_it_conforms(make, per_replica, subject, ranks, tmp_path):
    ranks.call("conform", path_of(make), str(tmp_path), per_replica, path_of(subject))


@pytest.mark.parametrize(
    ("per_replica", "options"),
    [(2, ACROSS), (1, {"distributed_optimizer": True, "compute_dtype": "bfloat16"})],
    ids=["TP2", "DP2, bfloat16"],
)
def test_what_is_away_is_saved_loaded_and_taken_over(per_replica, options, ranks, models, tmp_path):
    for checks in ranks.call("use_while_away", models["qwen2"], str(tmp_path), per_replica, options):
        assert checks == dict.fromkeys(checks, True)


SHIMMED = """
import sys, torch
from rlinf_workers.models.language_model import ModelSettings, build_model
from rlinf_workers.trainers.megatron import shim
shim.apply()
model = build_model(ModelSettings(folder=sys.argv[1], has_weights=True), torch.device("cpu"))
frequencies = model.model.rotary_emb.inv_freq
assert torch.equal(frequencies, 1e4 ** -torch.linspace(0, 1, len(frequencies) + 1)[:-1]), frequencies
"""


def test_under_the_shim_transformers_reads_its_models(models):
    """In a process that has not made one before."""
    done = subprocess.run([sys.executable, "-c", SHIMMED, models["qwen2"].folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_parts_of_a_model_are_the_same_by_the_names_in_memory_and_on_disk(models):
    """transformers 5 holds the experts of a layer as one stack, of which a rank of megatron-core has single ones."""
    from transformers import AutoConfig

    shape = TransformerShape.from_config(AutoConfig.from_pretrained(models["qwen3_moe"].folder).to_dict(), "float32")
    parts = layouts.megatron_layout(
        shape, tp=2, ep=2, expert_tp=1, transformer_engine=False, experts="sequential", vocab_multiple=8
    )
    whole = layouts.huggingface_layout(shape, fused_experts=True)
    (buffers,) = (rank.buffers for rank in whole.ranks)
    held = {name: torch.randn(buffer.shape) for name, buffer in buffers.items()}
    by_disk, by_memory = (
        [{name: torch.zeros(buffer.shape) for name, buffer in rank.buffers.items()} for rank in parts.ranks]
        for _ in range(2)
    )
    execute(reshard_plan(whole, parts), [held], by_disk)
    execute(reshard_plan(Layout.replicated(specs_of(held), 1), renamed(parts, whole)), [held], by_memory)
    assert any("experts" in name for name in by_disk[0])
    for expected, tensors in zip(by_disk, by_memory, strict=True):
        assert all(torch.equal(tensors[name], tensor) for name, tensor in expected.items())


def test_storages_go_and_come_back():
    whole = torch.arange(6.0)
    first, second = whole[:2], whole[2:4]
    storages = Storages(lambda: [("first", first), ("second", second), ("whole", whole)])
    storages.offload()
    storages.offload()
    assert whole.untyped_storage().nbytes() == 0
    assert storages.here(second).tolist() == [2.0, 3.0]
    storages.onload()
    storages.onload()
    assert whole.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


@pytest.mark.parametrize(
    ("options", "config", "says"),
    [
        (
            {"tensor_parallel": 3},
            {},
            "tensor_parallel=3 does not divide the model's 4 attention heads; use one of 1, 2, 4",
        ),
        ({"tensor_parallel": 4}, {}, "2 KV groups; use one of 1, 2"),
        ({"pipeline_parallel": 4}, {}, "pipeline_parallel=4: the model has 2 layers; use at most 2"),
        ({"virtual_pipeline_parallel": 2}, {}, "=2 needs pipeline_parallel of 2 or more; it has 1"),
        (
            {"pipeline_parallel": 2, "virtual_pipeline_parallel": 2},
            {},
            "virtual_pipeline_parallel=2 with pipeline_parallel=2: the model has 2 layers; use at most 1",
        ),
        ({"expert_parallel": 2}, {}, "the model has no experts; leave it out"),
        ({"tensor_parallel": 2, "expert_parallel": 3}, {}, "one must be a multiple of the other"),
        ({"expert_parallel": 3}, {"model_type": "qwen3_moe"}, "does not divide the model's 4 experts"),
        ({"tensor_parallel": 2}, {"model_type": "qwen3_moe"}, "needs sequence_parallel: true"),
        ({"sequence_parallel": True}, {}, "needs tensor_parallel of 2 or more"),
        ({"tensor_parallel": 0}, {}, "tensor_parallel=0: expected `int` >= 1"),
        ({"recompute": "yes"}, {}, "recompute='yes': expected `bool`, got `str`"),
        ({"compute_dtype": "float16"}, {}, "compute_dtype='float16': allowed: 'float32', 'bfloat16'"),
        ({"tensor_parallel": 2, "sequence_parallel": True}, {**KIND_GLM, "intermediate_size": 49}, "2 does not divide"),
        (
            {},
            {**KIND_GLM, "n_group": 4, "topk_group": 2, "norm_topk_prob": False},
            "n_group=4 with topk_group=2 and num_experts_per_tok=2, norm_topk_prob=false in the model's config",
        ),
        ({"tensor_parallel": 2, "sequence_parallel": True}, {**DEEP, "q_lora_rank": 25}, "25 numbers of a query's"),
        ({}, {**DEEP, "rope_parameters": {"rope_type": "longrope"}}, "rope_type='longrope' in the model's config"),
        ({}, {**KIND_GLM, "num_experts_per_tok": 1}, "num_experts_per_tok=1 in the model's config.json has no equiv"),
        ({}, {"use_sliding_window": True}, "use_sliding_window=true in the model's config.json has no equivalent"),
        ({}, {"model_type": "gemma2"}, "model_type='gemma2' has no mapping to megatron-core; supported: qwen2"),
    ],
)
def test_what_cannot_be_is_said_before_anything_starts(options, config, says, models):
    from transformers import AutoConfig

    kind = config.get("model_type", "qwen2")
    kind = kind if kind in models else "qwen2"
    sizes = AutoConfig.from_pretrained(models[kind].folder).to_dict()
    problems = ["".join(problem) for problem in SPEC.problems(options)]
    assert says in (problems[0] if problems else SPEC.config_problem(options, {**sizes, **config}) or "")


def test_what_is_no_language_model_is_refused():
    with pytest.raises(ValueError, match="cannot train a Chooser"):
        megatron(Chooser(), trial_worker(), optimizer=ADAMW, num_shards=1)


def test_one_frozen_model_is_whole_on_its_rank(models):
    kind = TokenModel(models["qwen2"], 1.0)
    frozen = megatron(kind, trial_worker(), optimizer=None, num_shards=NUM_SHARDS, tensor_parallel=2)
    assert isinstance(frozen, ReplicatedBackend)
