"""Values that do not go together, and configs that do not fit the machine."""

from typing import Any

import pytest
from pydantic import ValidationError

from rlinf.config.common import ClusterConfig
from rlinf.config.devices import (
    check_cluster,
    check_placement,
    device_kind,
    device_notes,
    devices_per_node,
    make_cluster,
    resolve_for_devices,
)
from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.config.reasoning import ModelConfig
from rlinf.errors import UserError
from rlinf.jobs.reasoning.job import ReasoningJob
from rlinf.machine import InstalledGpu, Machine
from rlinf.planning.plans import make_plans
from rlinf_algos import path_of
from rlinf_workers.trainers.spec import TrainerSpec


def message(recipe: str, line: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(recipe, parse_overrides(line.split(" ")))
    return str(caught.value)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "--model.path=/m",
            "--model.path=/m and model.architecture are both set; set one of them to null (--model.architecture null)",
        ),
        ("--model.architecture=null", "--model.architecture: model.path is not set; give --model.path FOLDER"),
        (
            "--model.architecture.hidden_size=98",
            "--model.architecture.hidden_size=98 is not a multiple of model.architecture.num_heads=4; use 96 or 100",
        ),
        (
            "--model.architecture.num_kv_heads=8",
            "--model.architecture.num_kv_heads: model.architecture.num_heads=4 is not a multiple of "
            "model.architecture.num_kv_heads=8; use 8",
        ),
        (
            "--rollout.max_prompt_tokens=60",
            "--rollout.max_prompt_tokens: model.architecture.max_positions=64 is less than rollout.max_prompt_tokens + "
            "rollout.max_new_tokens = 69; use at least 69",
        ),
        (
            "--rollout.on_new_weights=keep",
            "--rollout.on_new_weights=keep is not possible with rollout.engine=huggingface: without continuous "
            "batching a batch is generated as a whole and cannot pause; set engine_options.refill=true, or use finish",
        ),
        (
            "--rollout.on_new_weights=recompute --rollout.engine=unknown.engines:Mine",
            "--rollout.on_new_weights=recompute is not possible with rollout.engine=unknown.engines:Mine: it cannot "
            "pause running completions; use finish",
        ),
        (
            "--rollout.top_p=0.9",
            "--rollout.top_p=0.9: training needs the tokens that each was drawn from, which packed micro-batches "
            "carry; set actor.max_tokens_per_micro_batch, for example to 100, or leave rollout.top_p out, and use "
            "rollout.temperature for less noise (evaluation.top_p may be set)",
        ),
        (
            "--rollout.top_k=20 --rollout.engine=unknown.engines:Mine --actor.max_tokens_per_micro_batch=100",
            "--rollout.top_k=20: training needs the tokens that each was drawn from, and with "
            "rollout.engine=unknown.engines:Mine the engine does not say which these are (huggingface does); leave",
        ),
        (
            "--rollout.min_p=0.05 --actor.backend=megatron --mode=collocated",
            "--rollout.min_p=0.05: training needs the tokens that each was drawn from, and actor.backend=megatron "
            "computes log-probabilities over all tokens; use replicated or fsdp2, or leave",
        ),
        (
            "--rollout.top_p=0.9 --actor.max_tokens_per_micro_batch=100 --algorithm.advantage=otb",
            "--rollout.top_p=0.9: training needs the tokens that each was drawn from, and "
            "algorithm.advantage=otb weighs all tokens; leave",
        ),
        (
            "--task.num_digits=20",
            "the config has 2 mistakes:\n"
            "  - --task.num_digits: rollout.max_prompt_tokens=16 is too short: a prompt of task.num_digits=20 has 21 "
            "tokens; use at least 21\n"
            "  - --task.num_digits: rollout.max_new_tokens=9 is too short: an answer of task.num_digits=20 has 20 "
            "tokens; use at least 20",
        ),
        (
            "--algorithm.num_minibatches=3",
            "--algorithm.num_minibatches: rollout.num_prompts=64 is not a multiple of algorithm.num_minibatches=3; "
            "use 63 or 66",
        ),
        (
            "--rollout.num_prompts=1",
            "--rollout.num_prompts: actor.num_shards=2 is more than the 1 prompts of an optimizer step; use at most 1",
        ),
        (
            "--actor.num_shards=3",
            "--actor.num_shards: sft_warm_up.batch_size=256 is not a multiple of actor.num_shards=3; use 255 or 258",
        ),
        (
            "--actor.max_tokens_per_micro_batch=10",
            "--actor.max_tokens_per_micro_batch=10 is less than rollout.max_prompt_tokens + rollout.max_new_tokens = "
            "25, and a sequence is not cut; use at least 25",
        ),
        (
            "--actor.backend=megatron --actor.backend_options.context_parallel=2 --mode=collocated",
            "--actor.backend_options.context_parallel=2 ranks share packed micro-batches, and these are padded; set",
        ),
        (
            "--actor.balance_shards=true",
            "--actor.balance_shards=true needs actor.max_tokens_per_micro_batch, which is not set; set it, or leave",
        ),
        (
            "--actor.router_replay=true",
            "--actor.router_replay=true needs packed micro-batches; set actor.max_tokens_per_micro_batch, for example",
        ),
        (
            "--actor.router_replay=true --actor.max_tokens_per_micro_batch=64 --rollout.engine=sglang "
            "--rollout.stop=[x]",
            "--actor.router_replay=true is not possible with rollout.engine=sglang: SGLang returns no experts of a",
        ),
        (
            "--actor.router_replay=true --actor.max_tokens_per_micro_batch=64 --rollout.engine_options.refill=true "
            "--rollout.engine_options.keep_turns=true",
            "--actor.router_replay=true is not possible with rollout.engine=huggingface: it does not keep the experts",
        ),
        (
            "--actor.router_replay=true --actor.max_tokens_per_micro_batch=64 --rollout.engine_options.refill=true "
            "--rollout.sampler=as_finished --algorithm.max_staleness=2",
            "--actor.router_replay=true: with rollout.sampler=as_finished the completions of a group may have",
        ),
        (
            "--mode=hybrid --plan.num_ranks.actor=4 --plan.num_ranks_per_replica.actor=3",
            "--plan.num_ranks_per_replica.actor=3 does not divide plan.num_ranks.actor=4; every replica has as many "
            "ranks",
        ),
        (
            "--plan.num_ranks_per_replica.actor=2",
            "--plan.num_ranks_per_replica.actor: plan.num_ranks_per_replica={'actor': 2}: mode=auto chooses it; choose "
            "by hand under another mode, for example mode=hybrid",
        ),
        (
            "--mode=hybrid --plan.num_ranks.actor=4",
            "--plan.num_ranks.actor=4 does not divide actor.num_shards=2; use a divisor of 2, "
            "or 4 or a multiple of it as actor.num_shards, which a resumed run keeps",
        ),
        (
            "--evaluation.top_p=0.9",
            "--evaluation.top_p=0.9 is not used: evaluation.temperature=0 takes the likeliest token",
        ),
        (
            "--actor.lr_decay_steps=null --actor.min_lr_ratio=0.1",
            "--actor.min_lr_ratio=0.1 is not used: actor.lr_decay_steps is null, so the learning rate stays",
        ),
        (
            "--mode=collocated --plan.devices.actor=[0,7] --cluster.num_devices=2",
            "--plan.devices.actor=[0, 7]: device 7 does not exist; the run has devices 0 to 1",
        ),
        (
            "--mode=hybrid --cluster.num_devices=1",
            "--mode=hybrid needs at least 2 devices, and the run has 1",
        ),
        (
            "--plan.num_ranks.actor=2",
            "--plan.num_ranks.actor: plan.num_ranks={'actor': 2}: mode=auto chooses it; choose by hand under "
            "another mode, for example mode=hybrid",
        ),
        (
            "--actor.backend=megatron --actor.backend_options.tensor_paralel=2",
            "--actor.backend_options.tensor_paralel: megatron has no option of that name; "
            "did you mean 'tensor_parallel'?",
        ),
        (
            "--actor.backend=megatron --actor.backend_options.tensor_parallel=2",
            "--actor.backend_options.tensor_parallel: mode=auto plans ranks that each compute their own "
            "micro-batches, and actor.backend=megatron has 2 ranks a replica; use another mode, for example "
            "mode=collocated",
        ),
        (
            "--mode=collocated --actor.backend_options.sequence_parallel=2",
            "--actor.backend_options.sequence_parallel=2 ranks share packed micro-batches, and these are padded; set "
            "actor.max_tokens_per_micro_batch",
        ),
        (
            "--actor.backend=megatron --plan.num_ranks_per_replica.actor=2 --mode=hybrid",
            "--plan.num_ranks_per_replica.actor=2, but actor.backend_options make replicas of 1; leave it out",
        ),
    ],
)
def test_reasoning_values_that_do_not_go_together(line: str, expected: str):
    assert message("sort-grpo", line).startswith(expected)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("--env.num_groups=3", "env.num_envs=8 is not a multiple of env.num_groups=3; use 6 or 9"),
        (
            "--env.num_groups=4 --actor.num_shards=3",
            "env.num_groups=4 is not a multiple of actor.num_shards=3; use 3 or 6",
        ),
        (
            "--algorithm.num_minibatches=6 --actor.num_shards=2",
            "algorithm.num_minibatches=6 does not cut the env.num_envs * env.num_steps = 400 samples of a step, in "
            "actor.num_shards=2 shards, into equal minibatches; use 4 or 5",
        ),
        (
            "--env.eval_seed=2147483600",
            "env.eval_seed=2147483600 + env.num_eval_episodes=100 exceeds 2**31, where the seeds of training begin",
        ),
        ("--env.num_processes=9", "env.num_processes=9 exceeds the 4 environments of a group; use 0 to 4"),
        (
            "--env.hang_limit_s=5 --env.num_processes=0",
            "env.hang_limit_s=5.0 is not used: only a process of its own can be replaced; use env.num_processes=1",
        ),
        (
            "--actor.backend=megatron",
            "actor.backend=megatron holds language models alone; use ",
        ),
    ],
)
def test_embodied_values_that_do_not_go_together(line: str, expected: str):
    assert expected in message("pushcube-ppo", line)


@pytest.mark.parametrize(
    ("recipe", "line", "expected"),
    [
        ("sft", "--run.num_epochs=null", "run.num_steps is 0 and run.num_epochs is not set; set one of them"),
        ("sft", "--mode=hybrid", "mode=hybrid: a supervised job has one worker, the trainer; leave it out"),
        (
            "sft",
            "--actor.num_shards=64",
            "actor.num_shards=64 is more than the 32 examples of an optimizer step; use at most 32",
        ),
        (
            "sft",
            "--actor.max_tokens_per_micro_batch=512",
            "actor.max_tokens_per_micro_batch=512 is less than task.max_tokens=1024, and an example is not cut",
        ),
        (
            "sft",
            "--task.prompt_format=plain --task.system_prompt=Answer.",
            "task.system_prompt is set, but task.prompt_format=plain is no chat; use prompt_format chat",
        ),
        ("dpo", "--dpo.loss=ipo --dpo.label_smoothing=0.1", "dpo.label_smoothing=0.1 is not used by dpo.loss=ipo"),
        ("reward-model", "--actor.lora.rank=4", "actor.lora: a reward model is trained whole"),
        (
            "reward-model",
            "--actor.backend=megatron",
            "actor.backend=megatron holds language models alone, and a reward",
        ),
    ],
)
def test_supervised_values_that_do_not_go_together(recipe: str, line: str, expected: str):
    assert expected in message(recipe, f"--task.train_files=[a] --model.path=m {line}")


class Padding:
    """A backend that computes padded micro-batches alone."""

    spec = TrainerSpec(name="padding", packs_sequences=False, replays_routers=False)


@pytest.mark.parametrize(
    ("recipe", "line"), [("sort-grpo", "--actor.max_tokens_per_micro_batch=600"), ("sft", "--task.max_tokens=600")]
)
def test_packed_micro_batches_need_a_backend_that_packs(recipe: str, line: str):
    more = "" if recipe == "sort-grpo" else " --task.train_files=[a] --model.path=m"
    text = message(recipe, f"{line} --actor.backend={path_of(Padding)}{more}")
    assert f"packs sequences, and actor.backend={path_of(Padding)} computes padded ones alone" in text
    assert "use replicated or fsdp2 or megatron" in text


def test_router_replay_needs_a_backend_that_lets_experts_be_chosen():
    text = message("sort-grpo", f"--actor.router_replay=true --actor.backend={path_of(Padding)}")
    assert f"actor.backend={path_of(Padding)} does not let the actor choose experts; use replicated or fsdp2" in text


@pytest.mark.parametrize("template", ["{problem}", "{question} {other}", "no field", "{question}}", "{"])
def test_a_prompt_template_must_hold_its_field(template: str):
    arguments = [
        "--task.train_files=[a]",
        "--task.eval_files=[b]",
        "--model.path=m",
        f"--task.prompt_template={template}",
    ]
    with pytest.raises(UserError) as caught:
        load_config("gsm8k-grpo", parse_overrides(arguments))
    expected = (
        f"task.prompt_template={template!r} must hold {{question}} and no other brace; write {{{{ and }}}} for braces"
    )
    assert expected in str(caught.value)


def test_exact_rewards_for_gsm8k_answers_are_refused():
    line = "--task.train_files=[a] --task.eval_files=[b] --model.path=m --reward.kind=exact"
    assert "reward.kind=exact can never match answers of task.answer_format=gsm8k" in message("gsm8k-grpo", line)


def test_from_python_the_same_text_comes_in_pydantics_error():
    with pytest.raises(ValidationError) as caught:
        ModelConfig()
    assert "model.path is not set; give --model.path FOLDER" in str(caught.value)


# -- against the machine -------------------------------------------------------------------------------------------


def machine(num_cpus: int = 4, num_gpus: int = 0, **more: Any) -> Machine:
    gpus = (InstalledGpu(name="fake", memory_bytes=80 << 30),) * num_gpus
    return Machine(num_cpus=num_cpus, memory_bytes=64 << 30, gpus=gpus, **more)


def check(line: str, *, num_cpus: int = 4, num_gpus: int = 0, **more: Any) -> int:
    config = load_config("sort-grpo", parse_overrides(line.split()))
    has = machine(num_cpus, num_gpus, **more)
    num_devices = check_cluster(config.cluster, has)
    check_placement(config, has, num_devices)
    return num_devices


@pytest.mark.parametrize(
    ("line", "num_cpus", "num_gpus", "expected"),
    [
        (
            "--cluster.num_devices=5",
            4,
            0,
            "cluster.num_devices=5: this machine has 4 CPU cores and no GPU\nhint: use --cluster.num_devices 4 or "
            "auto, or let the slots share the cores with --cluster.oversubscribe true",
        ),
        ("--cluster.num_devices=2", 1, 0, "cluster.num_devices=2: this machine has 1 CPU core and no GPU"),
        (
            "--cluster.num_devices=9",
            64,
            8,
            "cluster.num_devices=9: this machine has 8 GPUs\nhint: use --cluster.num_devices 8 or auto",
        ),
        (
            "--cluster.num_devices=9 --cluster.oversubscribe=true",
            64,
            8,
            "cluster.num_devices=9: this machine has 8 GPUs",
        ),
        (
            "--mode=hybrid",
            1,
            0,
            "mode=hybrid needs at least 2 devices, and the run has 1\nhint: this machine has 1 CPU core and no GPU",
        ),
        (
            "--mode=disaggregated",
            64,
            1,
            "mode=disaggregated needs at least 2 devices, and the run has 1\nhint: this machine has 1 GPU; use",
        ),
        (
            "--mode=collocated --plan.devices.actor=[0,4]",
            4,
            0,
            "plan.devices.actor=[0, 4]: device 4 does not exist; the run has devices 0 to 3",
        ),
    ],
)
def test_a_config_that_does_not_fit_the_machine_is_refused(line: str, num_cpus: int, num_gpus: int, expected: str):
    with pytest.raises(UserError) as caught:
        check(line, num_cpus=num_cpus, num_gpus=num_gpus)
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("line", "num_cpus", "num_gpus"),
    [
        ("--cluster.num_devices=4", 4, 0),
        ("--cluster.num_devices=auto", 1, 0),
        ("--cluster.num_devices=5 --cluster.oversubscribe=true", 4, 0),
        ("--cluster.num_devices=8", 1, 8),
        ("--mode=hybrid", 2, 0),
        ("--mode=hybrid --cluster.num_devices=2 --cluster.oversubscribe=true", 1, 0),
        ("--cluster.device=cpu --cluster.num_devices=16", 16, 8),
    ],
)
def test_a_config_that_fits_the_machine_passes(line: str, num_cpus: int, num_gpus: int):
    check(line, num_cpus=num_cpus, num_gpus=num_gpus)


OLD_DRIVER = "8 GPUs: The NVIDIA driver on your system is too old (found version 11040)."


def test_gpus_that_cannot_be_used_are_refused_and_never_replaced_in_silence():
    for line in ("", "--cluster.device=gpu"):
        with pytest.raises(UserError, match=r"torch cannot use the GPUs of this machine \(8 GPUs: The NVIDIA driver"):
            check(line, unusable_gpus=OLD_DRIVER)
    assert check("--cluster.device=cpu", unusable_gpus=OLD_DRIVER) == 4


def test_who_installed_a_torch_for_cpus_is_told_and_not_refused():
    cluster, seen = ClusterConfig(), machine(unusable_gpus="/dev/nvidia0: not compiled", torch_has_cuda=False)
    assert device_kind(cluster, seen) == "cpu"
    assert "the GPUs are not used (/dev/nvidia0: not compiled)" in device_notes(cluster, seen)[0]
    assert device_notes(ClusterConfig(device="cpu"), seen) == []
    with pytest.raises(UserError, match="torch cannot use"):
        device_kind(ClusterConfig(device="gpu"), seen)


def test_a_gpu_can_be_required_and_passed_over():
    with pytest.raises(UserError, match=r"cluster\.device=gpu: this machine has 4 CPU cores and no GPU"):
        check("--cluster.device=gpu")
    assert check("--cluster.device=gpu", num_gpus=8) == 8
    assert check("--cluster.device=cpu", num_cpus=64, num_gpus=8) == 8  # slots of `auto`
    with pytest.raises(UserError, match=r"cluster\.num_devices=65: this machine has 64 CPU cores\nhint"):
        check("--cluster.device=cpu --cluster.num_devices=65", num_cpus=64, num_gpus=8)


@pytest.mark.parametrize(
    ("config", "nodes", "expected"),
    [
        ({}, [(4, 0), (2, 0)], (4, 2)),
        ({}, [(64, 0), (64, 0)], (8, 8)),
        ({"num_devices": 16}, [(64, 0), (64, 0)], (16, 0)),
        ({"num_devices": 5}, [(4, 0), (2, 0), (2, 0)], (4, 1, 0)),
        ({"num_devices": 5, "oversubscribe": True}, [(2, 0), (2, 0)], (3, 2)),
        ({}, [(64, 0), (64, 8)], (0, 8)),
        ({"num_devices": 6}, [(64, 4), (64, 4)], (4, 2)),
    ],
)
def test_a_node_gives_all_that_it_has_before_the_next(config: dict, nodes: list[tuple[int, int]], expected: tuple):
    cluster, all_nodes = ClusterConfig(**config), Machine.of_nodes([machine(*node) for node in nodes])
    assert devices_per_node(cluster, all_nodes) == expected
    actual = make_cluster(cluster, all_nodes)
    assert [sum(device.node == node for device in actual.devices) for node in range(len(nodes))] == list(expected)
    for device in actual.devices:
        share = 80 << 30 if device.kind == "cuda" else (64 << 30) // expected[device.node]
        assert device.memory_bytes == share


def test_what_a_cluster_has_is_said_of_the_cluster():
    nodes = Machine.of_nodes([machine(2), machine(2)])
    with pytest.raises(UserError, match=r"cluster\.num_devices=5: the cluster has 4 CPU cores and no GPU"):
        devices_per_node(ClusterConfig(num_devices=5), nodes)
    nodes = Machine.of_nodes([machine(2), machine(2, unusable_gpus="b: 4 GPUs, of which torch finds 0 there")])
    with pytest.raises(
        UserError, match=r"torch cannot use the GPUs of the cluster \(b: 4 GPUs, of which torch finds 0"
    ):
        device_kind(ClusterConfig(), nodes)


def test_shards_left_to_the_machine_are_as_many_as_its_devices_can_share():
    def shards(num_devices: int, *overrides: str) -> object:
        config: Any = resolve_for_devices(load_config("sort-grpo", parse_overrides(overrides)), num_devices)
        return config.actor.num_shards

    auto = "--actor.num_shards=auto"
    assert [shards(n, auto, "--sft_warm_up=null") for n in (1, 6, 8)] == [1, 6, 8]
    assert shards(8, auto, "--sft_warm_up=null", "--rollout.num_prompts=6") == 4  # six prompts; ranks divide devices
    assert shards(6, auto) == 2  # of 256 examples
    assert shards(8) == 2  # the recipe's own number stays


@pytest.mark.parametrize(
    ("backend", "num_ranks", "num_shards"),
    [("replicated", 4, 4), ("fsdp2", 4, 4), ("megatron", 4, 4), ("megatron tensor_parallel", 4, 2)],
)
def test_ranks_follow_from_the_devices_with_the_shards(tmp_path, backend: str, num_ranks: int, num_shards: int):
    name, _, cut = backend.partition(" ")
    overrides = ["--actor.num_shards=auto", "--sft_warm_up=null", "--mode=collocated", f"--actor.backend={name}"]
    overrides += [f"--actor.backend_options.{cut}=2"] if cut else []
    config: Any = resolve_for_devices(
        load_config("sort-grpo", parse_overrides([*overrides, "--cluster.num_devices=4"])), 4
    )
    job = ReasoningJob(config, Machine(num_cpus=4, memory_bytes=16 << 30))
    flows = job.build(tmp_path)
    actor = make_plans(job, flows, tmp_path).plans[flows.train.name].stage("actor")
    assert (actor.num_ranks, len(actor.devices)) == (num_ranks, 4)
    assert config.actor.num_shards == num_shards == flows.train.graph().stage("actor").num_parts


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (
            "--rollout.agent.run=loop",
            "--rollout.agent.run: rollout.agent.agents=hinter, guesser: run=loop is one agent; give a function that "
            "lets each of them speak",
        ),
        (
            "--rollout.agent.agents.hinter.trains=false --rollout.agent.agents.guesser.trains=false",
            "rollout.agent.agents: none of hinter, guesser trains; set trains: true for at least one",
        ),
        ("--rollout.agent.agents.a/b={}", "rollout.agent.agents.a/b"),
        (
            "--rollout.agent.agents.guesser.path=/m --rollout.agent.agents.hinter.policy=second",
            "rollout.agent.agents: all of hinter, guesser that train have a further policy, and the policy of "
            "model.path would not train; leave path and policy of one of them out",
        ),
        (
            "--rollout.agent.agents.judge.policy=second --rollout.agent.agents.judge.trains=false",
            "rollout.agent.agents.judge.policy=second: none of its agents (judge) trains it; set trains: true for one "
            "of them, or leave the policy out",
        ),
        (
            "--rollout.agent.agents.judge.policy=guesser --rollout.agent.agents.judge.path=/n "
            "--rollout.agent.agents.guesser.path=/m",
            "rollout.agent.agents.judge.path=/n: the policy guesser begins with /m, the path of another of its "
            "agents; give one path, or another policy",
        ),
        (
            "--rollout.agent.agents.guesser.policy=second --rollout.engine=sglang --rollout.engine_options={}",
            "--rollout.agent.agents.guesser.policy=second: it needs an engine of its own",
        ),
        (
            "--rollout.agent.agents.guesser.path=/m --algorithm.kl_coef=0.1",
            "--algorithm.kl_coef=0.1: the reference is one model, and the policy guesser begins with /m; use "
            "algorithm.kl_coef 0, actor.lora, or a policy that begins with model.path",
        ),
        (
            "--rollout.agent.agents.guesser.policy=second --algorithm.kl_coef=0.1 --reference.sync_every=2",
            "--reference.sync_every=2: the reference would follow the policy of model.path alone, and the policy "
            "second is compared with it too; leave it out",
        ),
        (
            "--rollout.agent.agents.guesser.policy=second --mode=collocated --plan.num_ranks.actor-second=3",
            "--plan.num_ranks.actor-second=3 does not divide actor.num_shards=2",
        ),
        (
            "--rollout.agent.agents.guesser.path=/m --rollout.agent.agents.guesser.trains=false "
            "--rollout.engine=sglang --rollout.engine_options={}",
            "--rollout.agent.agents.guesser.path=/m: it needs an engine of its own beside that of model.path, and "
            "rollout.engine=sglang cannot share a device with another; use huggingface",
        ),
    ],
)
def test_agents_that_cannot_play_are_refused(line: str, expected: str) -> None:
    assert expected in message("guess-team", line)


@pytest.mark.parametrize(
    "line",
    [
        "--rollout.sampler=as_finished --algorithm.max_staleness=2",
        "--rollout.on_new_weights=keep --algorithm.max_staleness=1",
    ],
)
@pytest.mark.parametrize("key", ["path=/m", "policy=second"])
def test_turns_of_a_partner_or_a_further_policy_end_with_their_step(line: str, key: str) -> None:
    keys = f"--rollout.agent.agents.guesser.trains={'false' if 'path' in key else 'true'}"
    ends = f"turns of a partner or a further policy (rollout.agent.agents.guesser.{key}) end with their step; use "
    assert ends in message("guess-team", f"{line} {keys} --rollout.agent.agents.guesser.{key}")
