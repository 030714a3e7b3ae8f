"""Derived profiles against first principles: nothing is faster than the datasheet, nothing gets cheaper with more."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest

from rlinf_sched import Problem, ProblemError, ProfileError, StageProfile
from rlinf_sched.derive import (
    LIBERO,
    MANISKILL_PUT_ON_PLATE,
    WORKLOADS,
    Embodied,
    Lengths,
    Reasoning,
    derive_profiles,
    embodied,
    find_gpu,
    find_model,
    grpo,
    ppo,
    train_profile,
    workload,
)
from rlinf_sched.derive.datasheets import SYNC_BYTES_PER_S
from rlinf_sched.derive.generation import act_profile, continuous_points, decode_step_s, generate_profile, read_s
from rlinf_sched.derive.simulators import (
    cpu_simulator_profile,
    gpu_simulator_profile,
    host_simulator_profile,
    on_busy_cores,
    slowed,
)
from rlinf_sched.derive.training import forward_profile
from rlinf_sched.plan import Mode
from rlinf_sched.planner import best_plan
from rlinf_sched.planner.pools import pools_of
from rlinf_sched.planner.search import Search

pytestmark = pytest.mark.usefixtures("brief_search")

H100, A100 = find_gpu("H100"), find_gpu("A100")
QWEN_7B, QWEN_MOE = find_model("Qwen2.5-7B"), find_model("Qwen3-30B-A3B")
LENGTHS = Lengths(mean_tokens=4000, limit_tokens=16_000, group_size=8)
SEQUENCES = {"item_tokens": 32_000.0, "context_tokens": 3000.0, "micro_batch_tokens": 16_000, "max_items": 256}
DENOISING = Embodied(
    simulator=LIBERO,
    num_envs=64,
    num_rounds=10,
    chunk_steps=5,
    denoising_steps=4,
    trained_steps=1,
    predicted_actions=50,
)


@pytest.fixture(scope="module", params=list(WORKLOADS))
def problem(request: pytest.FixtureRequest) -> Problem:
    return workload(request.param)


def test_every_workload_is_a_valid_problem_and_survives_json(problem: Problem) -> None:
    problem.validate()
    assert Problem.from_json(problem.to_json()) == problem


def test_no_stage_gets_faster_with_more_items(problem: Problem) -> None:
    for stage in problem.profiles.stages.values():
        for instance in stage.instances:
            seconds = [instance.seconds(n) for n in range(1, 600)]
            assert all(a <= b for a, b in pairwise(seconds))


def test_tables_reach_every_hand_over(problem: Problem) -> None:
    """The planner never has to extrapolate: the last point is the whole batch, or the engine's limit."""
    for stage in problem.profiles.stages.values():
        for instance in stage.instances:
            assert instance.points[-1].num_items == (instance.max_items or problem.num_items)


def test_every_profile_says_where_it_comes_from(problem: Problem) -> None:
    assert all(stage.source.startswith("derived") for stage in problem.profiles.stages.values())


def test_decoding_is_no_faster_than_reading_the_weights() -> None:
    # 15.2 GB over 3.35 TB/s; the input table is not read
    floor_s = 2 * (QWEN_7B.num_parameters - 152064 * 3584) / 3.35e12
    step_s = decode_step_s(QWEN_7B, H100, num_sequences=1, context_tokens=0)
    assert floor_s < step_s < 2 * floor_s


def test_decoding_on_an_a100_is_near_its_public_rate() -> None:
    # gpt-fast: 104.9 tokens/s of Llama-2-7B, batch 1; OpenVLA's decoder is that model
    step_s = decode_step_s(find_model("OpenVLA-7B"), A100, num_sequences=1, context_tokens=100)
    assert 1 / step_s == pytest.approx(104.9, rel=0.1)


def test_openvla_on_an_rtx_4090_is_near_its_public_rate() -> None:
    """About 6 actions/s (OpenVLA, arXiv:2406.09246); no constant comes from there."""
    policy = act_profile(
        find_model("OpenVLA-7B"),
        find_gpu("RTX 4090"),
        text_tokens=30,
        decode_tokens=7,
        num_rounds=1,
        max_items=1,
        engine="graphs",
    )
    assert 1 / policy.instances[0].seconds(1) == pytest.approx(6, rel=0.25)


def test_a_large_decode_batch_costs_its_keys_and_values_or_its_arithmetic() -> None:
    few = decode_step_s(QWEN_7B, H100, num_sequences=1, context_tokens=8000)
    many = decode_step_s(QWEN_7B, H100, num_sequences=101, context_tokens=8000)
    kv_s = 100 * 8000 * 57_344 / 3.35e12
    assert many - few > kv_s
    crowd = decode_step_s(QWEN_7B, H100, num_sequences=100_000, context_tokens=0)
    assert crowd > 100_000 * 2 * QWEN_7B.num_matmul_parameters / 989e12


def test_few_sequences_read_few_experts() -> None:
    one, many = (decode_step_s(QWEN_MOE, H100, num_sequences=n, context_tokens=0) for n in (1, 256))
    assert one < many / 5
    assert many > 2 * (QWEN_MOE.num_parameters - 151936 * 2048) / 3.35e12


def test_eager_decoding_is_no_faster() -> None:
    eager = decode_step_s(QWEN_7B, H100, num_sequences=1, context_tokens=0, engine="eager")
    assert eager > decode_step_s(QWEN_7B, H100, num_sequences=1, context_tokens=0)


def test_tensor_parallel_engines_are_faster_but_not_for_free() -> None:
    one, four = (
        decode_step_s(QWEN_7B, H100, num_sequences=8, context_tokens=4000, num_devices=size) for size in (1, 4)
    )
    assert one / 4 < four < one


def _by_size(profile: StageProfile) -> dict:
    """Of the instances that a trainer lists for several numbers of ranks, those for one."""
    return {instance.num_devices: instance for instance in profile.instances if instance.num_ranks <= 1}


def test_training_takes_six_operations_a_parameter_and_token_at_least() -> None:
    for size, instance in _by_size(train_profile(QWEN_7B, H100, **SEQUENCES)).items():
        assert instance.seconds(4) > 4 * 32_000 * 6 * QWEN_7B.num_matmul_parameters / (size * 989e12)


def test_a_forward_pass_is_a_quarter_of_training_with_recomputation() -> None:
    train = _by_size(train_profile(QWEN_7B, H100, **SEQUENCES))[1]
    forward = _by_size(forward_profile(QWEN_7B, H100, **SEQUENCES))[1]
    assert train.seconds(16) == pytest.approx(4 * forward.seconds(16))


def test_adam_on_7b_fits_eight_gpus_but_not_one() -> None:
    for sharding in ("data", "model"):
        profile = train_profile(QWEN_7B, H100, sharding=sharding, **{**SEQUENCES, "micro_batch_tokens": 4096})
        instance = min(profile.instances, key=lambda i: i.resident_bytes(8) + i.extra_bytes(1))
        assert (instance.resident_bytes(1) + instance.extra_bytes(1)) > H100.memory_bytes
        assert (instance.resident_bytes(8) + instance.extra_bytes(1)) < H100.memory_bytes
        # weights, gradients and optimizer: 16 bytes a parameter in fp32, 18 with a bf16 copy of the weights
        state = instance.state_bytes * instance.num_devices + instance.sharded_state_bytes
        assert 16 * QWEN_7B.num_parameters <= state <= 18 * QWEN_7B.num_parameters


def test_fsdp_spreads_what_megatron_repeats() -> None:
    fsdp = train_profile(QWEN_7B, H100, sharding="data", **SEQUENCES)
    assert {instance.num_devices for instance in fsdp.instances} == {1}
    megatron = _by_size(train_profile(QWEN_7B, H100, sharding="model", **SEQUENCES))
    assert fsdp.instances[0].resident_bytes(64) < megatron[1].resident_bytes(64)
    assert megatron[4].resident_bytes(64) < megatron[1].resident_bytes(64)
    # short micro-batches wait for the weights, but not on one device, which has them
    short = train_profile(QWEN_7B, H100, sharding="data", **{**SEQUENCES, "micro_batch_tokens": 500})
    seconds = {instance.num_ranks: instance.seconds(1) for instance in short.instances}
    assert seconds[64] > 64 * 3 * QWEN_7B.weights_bytes * 63 / 64 / (8 * 50e9) > seconds[1]


def test_activations_grow_with_the_micro_batch_and_split_over_devices() -> None:
    long, short = (
        _by_size(train_profile(QWEN_7B, H100, **{**SEQUENCES, "micro_batch_tokens": n})) for n in (32_000, 16_000)
    )
    assert long[1].work_bytes == 2 * short[1].work_bytes == 4 * long[4].work_bytes
    # fp32 logits of 16,000 tokens alone are 9.7 GB
    assert short[1].work_bytes > 9.7e9


def test_the_engine_holds_as_many_groups_as_its_cache_does() -> None:
    for size, instance in _by_size(generate_profile(QWEN_7B, H100, LENGTHS, max_items=10_000)).items():
        used = instance.state_bytes + instance.max_items * instance.item_work_bytes
        assert used <= 0.9 * H100.memory_bytes
        assert instance.state_bytes == QWEN_7B.weights_bytes // size
        assert instance.max_items * LENGTHS.group_size <= 256


def test_a_group_decodes_at_least_as_long_as_its_longest_answer() -> None:
    instance = generate_profile(QWEN_7B, H100, LENGTHS, max_items=16).instances[0]
    step_s = decode_step_s(QWEN_7B, H100, num_sequences=1, context_tokens=0)
    assert instance.seconds(1) > LENGTHS.mean_tokens * step_s


def test_an_engine_that_no_group_fits_is_refused() -> None:
    lengths = Lengths(mean_tokens=20_000, limit_tokens=100_000, group_size=64)
    with pytest.raises(ProfileError, match="use a smaller group"):
        generate_profile(find_model("OpenVLA-7B"), find_gpu("RTX 4090"), lengths, max_items=8)


def test_lengths_against_a_million_drawn_answers() -> None:
    generator = np.random.default_rng(0)
    answers = np.exp(0.75 * generator.standard_normal((125_000, 8)))
    low, high = 1000.0, 8000.0  # the median that gives clipped answers the wanted mean
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(middle * answers, 16_000).mean() < 4000 else (low, middle)
    tokens = np.minimum(low * answers, 16_000)
    lengths = Lengths(mean_tokens=4000, limit_tokens=16_000, group_size=8, prompt_tokens=0, sigma=0.75)
    assert lengths.longest_of_group_tokens == pytest.approx(tokens.max(axis=1).mean(), rel=0.02)
    assert lengths.mean_context_tokens == pytest.approx((tokens**2).mean() / tokens.mean() / 2, rel=0.02)
    sums = tokens.mean(axis=1) / 4000
    drawn = lengths.total_costs.draw(125_000, seed=0)
    assert drawn.std() == pytest.approx(sums.std(), rel=0.05)
    longest = lengths.longest_costs.quantiles(1000)
    assert longest[-1] == pytest.approx(16_000 / tokens.max(axis=1).mean(), rel=0.02)


def test_equal_lengths_have_equal_costs() -> None:
    lengths = Lengths(mean_tokens=100, limit_tokens=200, sigma=0)
    assert lengths.longest_costs.spread == lengths.total_costs.spread == "equal"
    assert lengths.longest_of_group_tokens == pytest.approx(100)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"mean_tokens": 300}, "mean_tokens=300"), ({"group_size": 0}, "group_size=0"), ({"sigma": -1}, "sigma=-1")],
)
def test_impossible_lengths_are_refused(change: dict, message: str) -> None:
    with pytest.raises(ProfileError, match=message):
        Lengths(**{"mean_tokens": 100, "limit_tokens": 200, **change})


def test_a_gpu_simulator_is_nearly_flat_and_no_faster_than_its_benchmark() -> None:
    instance = gpu_simulator_profile(MANISKILL_PUT_ON_PLATE, num_envs=256, num_rounds=80).instances[0]
    assert instance.seconds(32) < 2 * instance.seconds(1)
    # 20 times the substeps of the benchmark's task and more pixels cannot be faster than it
    assert 256 / instance.seconds(256) < 18_549
    assert instance.resident_bytes(4) - instance.resident_bytes(8) == 256 * MANISKILL_PUT_ON_PLATE.env_bytes // 8


def test_a_bridge_scene_takes_what_it_was_measured_to() -> None:
    """72 environments finish 60 steps in about a minute, a small policy included (SimplerEnv, pull request 38)."""
    instance = gpu_simulator_profile(MANISKILL_PUT_ON_PLATE, num_envs=256, num_rounds=80).instances[0]
    assert 60 * instance.seconds(72) == pytest.approx(60, rel=0.05)


@pytest.mark.parametrize(
    ("num_processes", "steps_per_s"), [(1, 11.2), (8, 82.9), (16, 152.1), (32, 267.1), (50, 364.6)]
)
def test_processes_slow_each_other_as_a_public_table_says(num_processes: int, steps_per_s: float) -> None:
    """vla-eval, LIBERO-Spatial, on a host of 48 cores."""
    alone_s = LIBERO.step_s + LIBERO.draw_s
    assert num_processes / (alone_s * slowed(num_processes, 48)) == pytest.approx(steps_per_s, rel=0.06)


def test_a_cpu_simulator_slows_a_little_up_to_its_cores_then_shares_them() -> None:
    profile = cpu_simulator_profile(LIBERO, steps_per_round=8, num_envs=512, num_rounds=64)
    instance = profile.instances[0]
    cores = LIBERO.cores_per_device
    assert instance.seconds(1) == pytest.approx(8 * (LIBERO.step_s + LIBERO.draw_s), rel=0.03)
    assert instance.seconds(1) < instance.seconds(cores) < 2 * instance.seconds(1)
    assert instance.seconds(4 * cores) == pytest.approx(4 * instance.seconds(cores))
    assert profile.rounds == 64


def test_processes_of_a_host_are_slower_the_more_there_are() -> None:
    alone = host_simulator_profile(LIBERO, steps_per_round=8, num_envs=512, num_rounds=64)
    shared = on_busy_cores(alone, 112)
    seconds = {one.num_ranks: one.seconds(4) for one in shared.instances}
    assert seconds[112] == pytest.approx(alone.instances[0].seconds(4) / 0.65)
    assert seconds[1] < seconds[16] < seconds[64] < seconds[112]
    assert shared.max_instances == 112


def test_parallel_decoding_saves_the_steps() -> None:
    serial, parallel = (
        act_profile(
            find_model("OpenVLA-OFT"),
            H100,
            text_tokens=30,
            decode_tokens=one_by_one,
            parallel_tokens=at_once,
            num_rounds=1,
            max_items=8,
        ).instances[0]
        for one_by_one, at_once in ((56, 0), (0, 56))
    )
    assert serial.seconds(1) > 20 * parallel.seconds(1)


def test_an_expert_costs_by_its_steps_and_what_is_frozen_costs_less() -> None:
    flow = workload("libero-openvla-oft-8").flow

    def seconds(stage: str, **changes) -> float:
        job = replace(DENOISING, **changes)
        return derive_profiles(flow, model="pi0", gpu="H100", job=job).stages[stage].instances[0].seconds(64)

    once, twice = seconds("policy", denoising_steps=1), seconds("policy", denoising_steps=2)
    assert seconds("policy", denoising_steps=4) == pytest.approx(once + 3 * (twice - once))
    one_camera, two = seconds("policy", num_cameras=1), seconds("policy", num_cameras=2)
    assert one_camera < two < 2 * one_camera
    whole, frozen = seconds("actor"), seconds("actor", trains_expert_alone=True)
    assert 1 / 4 < frozen / whole < 1 / 3  # the decoder runs forward alone, not four times as much
    assert seconds("actor", trained_steps=4) > whole
    with pytest.raises(ProfileError, match="give the job denoising_steps"):
        seconds("policy", denoising_steps=0)


def test_updates_from_a_buffer_cost_by_what_they_train_on() -> None:
    flow = workload("libero-openvla-oft-8").flow

    def actor(**changes) -> StageProfile:
        job = replace(DENOISING, num_minibatches=2, **changes)
        return derive_profiles(flow, model="pi0", gpu="H100", job=job).stages["actor"]

    twice_all = 2 * DENOISING.num_envs * DENOISING.num_rounds
    assert actor(num_trained=twice_all).instances[0].points == actor(num_epochs=2).instances[0].points
    assert actor(num_trained=twice_all).instances[0].step_s == actor().instances[0].step_s  # as many updates


@pytest.mark.parametrize(("name", "pixels"), [("maniskill-openvla-8", 640 * 480), ("libero-openvla-oft-8", 224 * 224)])
def test_pictures_travel_as_the_simulator_draws_them(name: str, pixels: int) -> None:
    problem = workload(name)
    carried = problem.flow.item_bytes
    assert carried["observations"] == 3 * pixels
    numbers = 3 * carried["actions"]  # 4 bytes a number there, 12 here
    assert carried["trajectories"] == problem.profiles.stages["env"].rounds * (3 * pixels + numbers)
    two = embodied(Embodied(simulator=LIBERO, num_envs=8, num_rounds=2, num_cameras=2, picture_pixels=100))
    assert two.flow.item_bytes["observations"] == 600


def test_a_users_own_numbers(tmp_path) -> None:
    (tmp_path / "config.json").write_text(
        '{"model_type": "qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,'
        ' "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": true}'
    )
    problem = grpo(model=tmp_path, gpu="A100", num_devices=4, num_prompts=32, group_size=4, sequence_tokens=4096)
    problem.validate()
    assert problem.num_items == 32
    assert problem.profiles.stages["actor"].weights_bytes == 2 * 494_032_768  # Qwen2.5-0.5B has that shape
    asynchronous = ppo(num_devices=8, max_staleness=1, sharding="data")
    asynchronous.validate()
    assert asynchronous.flow.max_staleness == 1
    own = Embodied(simulator=MANISKILL_PUT_ON_PLATE, num_envs=64, num_rounds=10)
    assert embodied(own, gpu="H200", num_devices=2).profiles.stages["env"].rounds == 10


def test_profiles_of_a_users_own_flow() -> None:
    flow = grpo(num_devices=8).flow
    job = Reasoning(lengths=LENGTHS, num_groups=16)
    profiles = derive_profiles(flow, model="Qwen2.5-1.5B", gpu="a100", job=job)
    assert profiles.stages.keys() == {"rollout", "logprobs", "reward", "actor"}
    assert profiles.stages["reward"].instances[0].num_devices == 0
    several = next(one for one in profiles.stages["actor"].instances if one.num_ranks > 1)
    assert several.step_s > 0 == profiles.stages["logprobs"].instances[0].step_s
    with pytest.raises(ProfileError, match="derive it from an Embodied job"):
        derive_profiles(workload("maniskill-openvla-8").flow, model="OpenVLA-7B", gpu="H100", job=job)


def test_a_step_of_nothing_is_refused() -> None:
    with pytest.raises(ProfileError, match="num_groups=0"):
        grpo(num_prompts=0)
    with pytest.raises(ProfileError, match="num_rounds=0"):
        Embodied(simulator=LIBERO, num_envs=8, num_rounds=0)


@pytest.mark.parametrize("mode", ["collocated", "disaggregated"])
def test_a_sync_takes_the_time_to_pack_the_model(mode: Mode) -> None:
    """In the simulated step and in the search's estimate, once for each of the two edges."""
    problem = grpo(model="Qwen2.5-1.5B", num_devices=4, num_prompts=8, group_size=4, sequence_tokens=4096)
    at_once = replace(
        problem, cluster=replace(problem.cluster, links=replace(problem.cluster.links, sync_bytes_per_s=None))
    )
    packed, unpacked = (best_plan(one, modes=[mode]).prediction for one in (problem, at_once))
    packing_s = 2 * find_model("Qwen2.5-1.5B").weights_bytes / SYNC_BYTES_PER_S
    assert packed and unpacked
    assert packed.step_s - unpacked.step_s == pytest.approx(packing_s)
    searches = [Search(one, pools_of(one.cluster)).best([mode]) for one in (problem, at_once)]
    packed_s, unpacked_s = (candidates[0].step_s for candidates in searches)
    assert packed_s - unpacked_s == pytest.approx(packing_s)


def test_a_sync_of_30b_takes_what_public_systems_take() -> None:
    """SkyRL 6 s, slime 7 s, on 8 H100."""
    problem = workload("grpo-qwen3-30b-a3b-32")
    assert 6 < problem.sync_latency_s(problem.flow.weight_edges[0]) < 7


def test_an_unknown_workload_gets_the_nearest() -> None:
    with pytest.raises(ProblemError, match=r"did you mean 'grpo-qwen2.5-7b-64'"):
        workload("grpo-qwen2.5-7b-46")


# -- episodes of several turns -----------------------------------------------------------------------------------------


def turned(**more):
    return Lengths(mean_tokens=400, limit_tokens=2000, prompt_tokens=100, group_size=8, **more)


def test_a_turn_reads_the_whole_conversation_unless_the_engine_keeps_it():
    """Four turns of 100 tokens after a prompt of 100: the later three read 200, 300 and 400 tokens; the share of a turn
    in the middle of an answer is its half on average."""
    assert turned().read_tokens == turned(num_turns=4).read_tokens == 100
    assert turned(num_turns=4, reads_cache=False).read_tokens == 100 + 8 * 3 * (100 + 200)
    assert turned(num_turns=4, sampled_share=0.25).read_tokens == 100 + 8 * 300


@pytest.mark.parametrize("most", [1, 16])
def test_waits_for_tools_are_added_to_an_episode_and_leave_the_engine_to_others(most):
    """By hand: with waits as long as the time in the engine, half of the episodes are in it at a time."""

    def seconds(lengths):
        return continuous_points(QWEN_7B, H100, lengths, most=most, num_devices=1)[-1].seconds

    without = seconds(turned())
    prefill_s = most * read_s(QWEN_7B, H100, turned())
    longest = turned().longest_of_group_tokens
    outside_s = without - prefill_s
    lengths = turned(outside_s=outside_s * 400 / longest)
    running = 8 * 400 / longest * most / 2
    step_s = decode_step_s(QWEN_7B, H100, num_sequences=running, context_tokens=lengths.mean_context_tokens)
    assert seconds(lengths) == pytest.approx(outside_s + longest * step_s + prefill_s)
    assert seconds(turned(sampled_share=0.5)) < without


@pytest.mark.parametrize("wrong", [{"num_turns": 0.5}, {"outside_s": -1.0}, {"sampled_share": 0.0}])
def test_turns_that_cannot_be_are_refused(wrong):
    with pytest.raises(ProfileError, match=next(iter(wrong))):
        turned(**wrong)
