"""What this machine has, and plans for machines that are not here."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from rlinf import jobs
from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.config.reasoning import ArchitectureConfig
from rlinf.machine import InstalledGpu, Machine, this_machine
from rlinf.planning.plans import RunPlans, make_plans
from rlinf.tasks.language import write_model_folder

SERVER = Machine(num_cpus=64, memory_bytes=1 << 40, gpus=(InstalledGpu(name="fake", memory_bytes=80 << 30),) * 8)


def planned(recipe: str, *overrides: str) -> RunPlans:
    job = jobs.prepare(load_config(recipe, parse_overrides(overrides)), SERVER)
    return make_plans(job, job.build(Path("none")), Path("none"))


def test_a_driver_older_than_torchs_cuda_gives_no_gpu_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The driver's library counts eight, the CUDA runtime refuses them."""

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\nand more")

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "init", init)
    machine = this_machine()
    assert (machine.gpus, machine.unusable_gpus) == ((), "8 GPUs: The NVIDIA driver on your system is too old")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert this_machine().unusable_gpus == ""  # hidden on purpose


def test_gsm8k_trains_on_every_gpu(tmp_path: Path) -> None:
    write_model_folder(tmp_path / "model", ArchitectureConfig(max_positions=1024), "0123456789", "float32")
    save_file({"unused": torch.zeros(1)}, tmp_path / "model" / "model.safetensors")  # nobody loads it
    files = []
    for key, question in (("train_files", "12"), ("eval_files", "34")):
        (tmp_path / key).with_suffix(".jsonl").write_text(json.dumps({"question": question, "answer": "#### 1"}))
        files.append(f"--task.{key}=[{tmp_path / key}.jsonl]")
    job = jobs.prepare(
        load_config("gsm8k-grpo", parse_overrides([*files, f"--model.path={tmp_path / 'model'}"])), SERVER
    )
    plan = make_plans(job, job.build(tmp_path), tmp_path).plans["grpo"]
    assert {stage.stage: stage.num_ranks for stage in plan.stages} == {
        "rollout": 8,
        "reference": 8,
        "reward": 1,
        "actor": 8,
    }
    assert job.config.actor.num_shards == 8  # what config.yaml keeps


@pytest.mark.parametrize(("memory_bytes", "leaves"), [(80 << 30, False), (2900 << 20, True)])
def test_state_leaves_a_gpu_only_where_it_has_to(memory_bytes: int, leaves: bool) -> None:
    machine = replace(SERVER, gpus=(InstalledGpu(name="fake", memory_bytes=memory_bytes),))
    job = jobs.prepare(load_config("sort-grpo", parse_overrides([])), machine)
    run_plans = make_plans(job, job.build(Path("none")), Path("none"))
    placed = [stage for plan in run_plans.plans.values() for stage in plan.stages if stage.devices]
    assert {stage.offload for stage in placed} == {leaves}
    assert any("none of it goes to the host" in note for note in run_plans.notes) != leaves


@pytest.mark.parametrize(
    ("mode", "num_devices", "num_ranks", "note"),
    [
        ("collocated", 2, 2, None),
        ("collocated", 3, 1, " and the number of devices; --cluster.num_devices 2 gives it 2"),
        ("collocated", 8, 4, ""),
        ("hybrid", 3, 2, ""),
        ("hybrid", 6, 4, ""),
        ("auto", 3, 1, ""),
    ],
)
def test_ranks_divide_the_shards_that_a_resumed_run_keeps(mode: str, num_devices: int, num_ranks: int, note):
    """As when a run on four devices is resumed on three, or on six."""
    run_plans = planned("sort-grpo", f"--mode={mode}", "--actor.num_shards=4", f"--cluster.num_devices={num_devices}")
    ranks = f"{num_ranks} rank{'' if num_ranks == 1 else 's'}"
    expected = f"actor: {ranks} for {num_devices} devices, because the ranks must divide actor.num_shards=4{note}"
    assert run_plans.plans["grpo"].stage("actor").num_ranks == num_ranks
    assert [text for text in run_plans.notes if text.startswith("actor: ")] == ([] if note is None else [expected])


def test_simulators_run_on_the_cores_beside_the_gpus() -> None:
    env = ["--env.kind=gymnasium", "--env.id=Pendulum-v1", "--env.options={}"]
    sizes = ["--env.num_envs=32", "--env.num_groups=16", "--run.stop_at_score=null", "--algorithm.name=ppo"]
    plan = planned("pushcube-ppo", *env, *sizes).plans["ppo"]
    assert (plan.stage("env").devices, plan.stage("env").num_ranks) == ((), 16)
    assert plan.stage("policy").devices == tuple(range(8))
    on_slots = planned("pushcube-ppo", *env, *sizes, "--cluster.device=cpu").plans["ppo"]
    assert on_slots.stage("env").devices == tuple(range(8))


def test_work_that_comes_in_parts_is_dealt_to_replicas() -> None:
    replicas = ["--mode=hybrid", "--plan.num_ranks_per_replica={policy: 2, actor: 4}"]
    env = ["--env.kind=gymnasium", "--env.id=Pendulum-v1", "--env.options={}", "--run.stop_at_score=null"]
    plans = planned("pushcube-ppo", *env, *replicas, "--env.num_groups=2", "--actor.num_shards=1").plans
    assert [(plans[flow].stage("policy").num_ranks, plans[flow].stage("policy").num_replicas) for flow in plans] == [
        (4, 2),
        (4, 2),
    ]
    assert (plans["ppo"].stage("actor").num_ranks, plans["ppo"].stage("actor").num_replicas) == (4, 1)
