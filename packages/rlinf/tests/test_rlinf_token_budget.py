"""`actor.max_tokens_per_micro_batch: auto`: on GPUs a number by their memory, on CPU slots padded micro-batches."""

import re
from typing import Any

import pytest

from rlinf import jobs
from rlinf.cli.main import main
from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.jobs.reasoning import memory
from rlinf.jobs.reasoning.memory import BUSY_TOKENS, loads_alone, with_actor, with_token_budget
from rlinf.machine import InstalledGpu, Machine
from rlinf.planning.memory import at_once_place
from rlinf_algos import path_of
from rlinf_sched.derive import resolve_model
from rlinf_workers.trainers.replicated.backend import ReplicatedBackend
from rlinf_workers.trainers.spec import TrainerSpec

GIB = 1 << 30
FAST = ("--mode=collocated", "--cluster.num_devices=1")


def config_of(recipe: str, *overrides: str) -> Any:
    return load_config(recipe, parse_overrides(overrides))


def settled(memory_bytes: int, *overrides: str) -> tuple[Any, Any]:
    """The config and the notes of a prepared job on a GPU of that size."""
    machine = Machine(num_cpus=2, memory_bytes=64 * GIB, gpus=(InstalledGpu(name="fake", memory_bytes=memory_bytes),))
    job = jobs.prepare(config_of("sort-grpo", *FAST, *overrides), machine)
    return job.config, job.notes


def test_a_gpu_has_a_number_of_tokens_and_cpu_slots_pad() -> None:
    config, notes = settled(80 * GIB)
    assert config.actor.max_tokens_per_micro_batch == config.actor.token_budget == 32768
    assert not any("micro-batches" in note for note in notes)
    on_cpu = jobs.prepare(config_of("sort-grpo", *FAST), Machine(num_cpus=2, memory_bytes=16 * GIB))
    assert on_cpu.config.actor.max_tokens_per_micro_batch is None


def test_a_number_and_null_stay() -> None:
    for text, value in (("700", 700), ("null", None)):
        config, _ = settled(80 * GIB, f"--actor.max_tokens_per_micro_batch={text}")
        assert config.actor.max_tokens_per_micro_batch == value


class Padding(ReplicatedBackend):
    spec = TrainerSpec(name="padding", packs_sequences=False)


def test_a_backend_that_pads_gets_padded_micro_batches() -> None:
    config, _ = settled(80 * GIB, f"--actor.backend={path_of(Padding)}", "--mode=collocated")
    assert config.actor.max_tokens_per_micro_batch is None


@pytest.fixture
def recipe():
    def make(*overrides: str):
        lengths = (
            "--rollout.max_prompt_tokens=512",
            "--rollout.max_new_tokens=2048",
            "--model.architecture.max_positions=4096",
            "--sft_warm_up=null",
        )
        config = config_of("sort-grpo", *lengths, "--model.dtype=bfloat16", *overrides)
        return config.model_copy(update={"actor": config.actor.model_copy(update={"num_shards": 1})})

    return make


def test_the_budget_follows_the_memory_that_is_left(recipe) -> None:
    """Down to the longest sequence, which is not cut."""
    shape = resolve_model("Qwen2.5-1.5B")
    config = recipe()
    budgets = [
        with_token_budget(config, shape, device_bytes=size * GIB, num_devices=1).actor.token_budget or 0
        for size in (400, 40, 24, 8)
    ]
    assert budgets == sorted(budgets, reverse=True)
    assert budgets[0] == 32768 and budgets[-1] == config.rollout.max_sequence_tokens
    assert len(set(budgets)) > 2


def test_all_roles_stay_on_the_gpu_where_that_leaves_it_busy(recipe) -> None:
    """Fewer tokens than the trainer alone has memory for, rather than offloading its state at every step."""
    shape, config = resolve_model("Qwen2.5-0.5B"), recipe()
    small, large = (with_token_budget(config, shape, device_bytes=size * GIB, num_devices=1) for size in (40, 48))
    assert (small.actor.token_budget or 0) > (large.actor.token_budget or 0) >= BUSY_TOKENS
    loads = loads_alone(large, shape, 48 * GIB, 1, (0,), num_items=64)
    assert at_once_place("", 48 * GIB, loads).missing_bytes <= 0


def test_activations_are_recomputed_only_where_memory_lacks_without(recipe) -> None:
    """Where fewer tokens than keep a GPU busy fit without, or not the micro-batch that the recipe names."""
    shape = resolve_model("Qwen2.5-1.5B")

    def actor(size: int, *overrides: str) -> Any:
        config = recipe("--actor.backend=fsdp2", *overrides)
        return with_token_budget(config, shape, device_bytes=size * GIB, num_devices=1).actor

    sizes = range(8, 60, 4)
    recomputed = [size for size in sizes if actor(size).backend_options == {"recompute": True}]
    assert recomputed and recomputed[-1] < 48, "only on a small GPU"
    assert actor(8).backend_options == {}, "it would not help there"
    named = [size for size in sizes if actor(size, "--actor.max_tokens_per_micro_batch=8192").backend_options]
    assert named and set(named) <= set(recomputed)
    larger = [actor(size) for size in sizes if size > recomputed[-1]]
    assert all((one.token_budget or 0) >= BUSY_TOKENS and not one.backend_options for one in larger)
    assert actor(recomputed[0], "--actor.backend_options={recompute: false}").backend_options == {"recompute": False}


def test_the_recipe_for_one_gpu_recomputes_nothing_on_an_empty_card() -> None:
    for name in ("Qwen2.5-0.5B", "Qwen2.5-1.5B"):
        files = ("--model.path=somewhere", "--task.train_files=[questions.jsonl]")
        config = config_of("gsm8k-grpo-fsdp2", "--actor.num_shards=1", *files)
        settled = with_token_budget(config, resolve_model(name), device_bytes=74 * GIB, num_devices=1)
        assert not settled.actor.backend_options.get("recompute") and (settled.actor.token_budget or 0) >= BUSY_TOKENS


def test_what_was_chosen_fits_by_the_same_count(recipe) -> None:
    """The budget is the largest whose passes, with the allocator's reserve, have memory beside the trainer's state."""
    shape, config, size = resolve_model("Qwen2.5-1.5B"), recipe(), 40 * GIB
    chosen = with_token_budget(config, shape, device_bytes=size, num_devices=1)
    more = with_actor(config, max_tokens_per_micro_batch=2 * (chosen.actor.token_budget or 0))
    needed = []
    for one in (chosen, more):
        actor = next(load.memory for load in loads_alone(one, shape, size, 1, (0,)) if load.group == "actor")
        needed.append(actor.state + 1.25 * actor.work() + GIB)
    assert needed[0] <= size < needed[1]


def test_a_plan_says_which_number_it_took(capsys) -> None:
    where = ["--model.path", "Qwen2.5-1.5B", "--cluster.num_devices", "1", "--mode", "collocated"]
    assert main(["plan", "gsm8k-grpo", *where]) == 0
    assert re.search(r"actor.max_tokens_per_micro_batch=auto is [1-9][\d,]+ tokens", capsys.readouterr().out)
    assert main(["plan", "gsm8k-grpo", *where, "--actor.max_tokens_per_micro_batch", "4096"]) == 0
    assert "auto is" not in capsys.readouterr().out


def test_a_run_counts_all_nodes_and_the_smallest_gpu(monkeypatch) -> None:
    """As a plan does: weight sync over a network keeps other bytes on GPUs than within a machine."""
    where: dict[str, Any] = {}

    def noted(config: Any, shape: Any, **arguments: Any) -> Any:
        where.update(arguments)
        return with_actor(config, max_tokens_per_micro_batch=4096)

    monkeypatch.setattr(memory, "with_token_budget", noted)
    nodes = [
        Machine(num_cpus=2, memory_bytes=64 * GIB, gpus=(InstalledGpu(name="fake", memory_bytes=size * GIB),))
        for size in (80, 40)
    ]
    config = config_of("sort-grpo", "--mode=collocated", "--cluster.num_devices=2")
    assert jobs.prepare(config, Machine.of_nodes(nodes)).config.actor.token_budget == 4096
    assert where == {"device_bytes": 40 * GIB, "num_devices": 2, "nodes": range(2)}
