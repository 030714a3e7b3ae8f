"""The trainer's share of a GPU's peak, the reference's time, and how often the host waits: results/trainer-gpu.json.

    python -m benchmarks.throughput.trainer_gpu [--models 0.5B 1.5B] [--rounds 5] [--compiled-alone] [--gpu H100]

An actor in this process learns from groups of 8 answers of 1,024 to 2,048 tokens, with the backend and its options of
`gsm8k-grpo-fsdp2` (weights in float32, passes in bfloat16), once with compiled layers and once without; a reference
scores the same groups. Models have the shapes of Qwen2.5-0.5B and -1.5B and random weights. The share is the arithmetic
of the tokens that are computed, three times that of a forward pass, by the time and by the datasheet's rate. Host waits
are those that `torch.cuda.set_sync_debug_mode` names in one update. On a CPU (`--tiny`) the script itself is tried.
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import compare, report
from benchmarks.sched.gpu_steps import SHAPES, write_model

from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.config.reasoning import ReasoningConfig
from rlinf_algos import preset
from rlinf_sched.derive import ModelShape, find_gpu, resolve_model
from rlinf_workers.execution.worker_host import WorkerHost
from rlinf_workers.launchers import Identity
from rlinf_workers.models import ModelSettings
from rlinf_workers.models.packed import computed_tokens
from rlinf_workers.roles import ActorSettings, ScoredGroup
from rlinf_workers.roles.language.actor import Actor
from rlinf_workers.roles.language.micro_batches import num_tokens_of
from rlinf_workers.roles.language.reference import Reference
from rlinf_workers.roles.records.language import Prompt, SampleGroup
from rlinf_workers.trainers import BackendSettings, OptimizerSettings
from rlinf_workers.worker import StepContext

RECIPE, GROUP_SIZE = "gsm8k-grpo-fsdp2", 8
SIDES = {"actor, compiled": True, "actor, plain": False}


@dataclass(frozen=True, kw_only=True)
class Size:
    """What a step computes."""

    num_groups: int
    prompt_tokens: int
    least_tokens: int
    most_tokens: int
    """Of an answer."""
    budget: int
    """Tokens of a micro-batch."""


FULL = Size(num_groups=8, prompt_tokens=128, least_tokens=1024, most_tokens=2048, budget=16384)
SMALL = Size(num_groups=2, prompt_tokens=4, least_tokens=4, most_tokens=8, budget=64)


def make_worker(worker_class: Any, *arguments: Any, device: str, num_items: int) -> Any:
    """A worker in this process, with its state on the device."""
    identity = Identity(role="actor", rank=0, num_ranks=1, devices=(device,), rendezvous="")

    def refuse(service: str, value: Any, *, wants_reply: bool = True) -> Any:
        raise AssertionError(f"there is no driver for {service!r}")

    host = WorkerHost(identity, refuse)
    host.step = StepContext(step=0, phase="train", seed=0, num_items=num_items)
    worker = host.make(worker_class, *arguments)
    worker.onload()
    worker.report_progress = lambda *_, **__: None
    return worker


def scored_groups(size: Size, vocab_size: int) -> list[ScoredGroup]:
    """Random tokens; half of the answers of a group are right."""
    drawn = torch.Generator().manual_seed(0)
    groups = []
    for index in range(size.num_groups):
        lengths = torch.randint(size.least_tokens, size.most_tokens + 1, (GROUP_SIZE,), generator=drawn)
        mask = (torch.arange(size.most_tokens) < lengths[:, None]).float()
        prompt_ids = torch.randint(vocab_size, (size.prompt_tokens,), generator=drawn)
        samples = SampleGroup(
            prompt=Prompt(index=index, token_ids=prompt_ids, reference_answer=""),
            completion_ids=torch.randint(vocab_size, mask.shape, generator=drawn),
            loss_mask=mask,
            rollout_logprobs=-10.0 * mask,
            policy_version=0,
        )
        rewards = torch.arange(GROUP_SIZE).remainder(2).float()
        groups.append(ScoredGroup(samples=samples, rewards=rewards, completions=("",) * GROUP_SIZE))
    return groups


def forward_flops(shape: ModelShape, groups: Sequence[ScoredGroup]) -> float:
    """Operations of a forward pass over packed groups, as the metric `perf/mfu` counts them."""
    tokens, attended = computed_tokens(group.samples for group in groups)
    return tokens * shape.forward_flops(attended / tokens)


def update(actor: Actor, groups: Sequence[ScoredGroup]) -> None:
    """A training step of one update."""
    actor.begin_step()
    (minibatch,) = actor.minibatches(actor.learning_groups(groups))
    micro_batches = actor.micro_batches(minibatch)
    actor.begin_update()
    for batch in micro_batches:
        actor.learn(batch)
    actor.end_update()
    actor.end_step()


def seconds(do: Callable[[], Any]) -> float:
    """Until the device has done it."""
    start_s = time.perf_counter()
    do()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start_s


@contextmanager
def host_waits() -> Iterator[list[str]]:
    """Yields a list that has, afterwards, where the host has waited for the GPU: file and line of each wait."""
    places: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("default")
    places += [f"{Path(one.filename).name}:{one.lineno}" for one in caught if "synchronizing CUDA" in str(one.message)]


def measure(
    folder: Path,
    size: Size,
    device: str,
    *,
    sides: Mapping[str, bool],
    num_warmup: int,
    num_rounds: int,
    peak: float,
) -> dict[str, Any]:
    """Seconds of updates and of the reference's pass, with what they come to.

    Args:
        sides: name -> whether layers are compiled.
        peak: operations a second.
    """
    shape = resolve_model(folder)
    groups = scored_groups(size, shape.vocab_size)
    files = [f"--model.path={folder}", "--task.train_files=[questions.jsonl]"]
    recipe = load_config(RECIPE, parse_overrides(files))
    assert isinstance(recipe, ReasoningConfig), f"{RECIPE} trains a language model"
    model = ModelSettings(folder=str(folder), has_weights=True, dtype=recipe.model.dtype)
    flops, samples_s, waits = forward_flops(shape, groups), {}, {}

    def backend(compile_layers: bool) -> BackendSettings:
        options = {**recipe.actor.backend_options, "compile": compile_layers and device != "cpu:0"}
        return BackendSettings(name=recipe.actor.backend, options=options, num_shards=1)

    for side, compiles in sides.items():
        settings = ActorSettings(
            model=model,
            algorithm=preset("grpo"),
            optimizer=OptimizerSettings(learning_rate=1e-6),
            backend=backend(compiles),
            micro_batch_groups=1,
            max_tokens_per_micro_batch=size.budget,
            num_prompts=size.num_groups,
            max_completion_tokens=size.most_tokens,
            temperature=1.0,
        )
        actor = make_worker(Actor, settings, device=device, num_items=size.num_groups)
        for _ in range(num_warmup):
            update(actor, groups)
        samples_s[side] = [seconds(lambda actor=actor: update(actor, groups)) for _ in range(num_rounds)]
        with host_waits() as places:
            update(actor, groups)
        waits[side] = places
        del actor
        gc.collect()
        torch.cuda.empty_cache()
    reference = make_worker(Reference, model, 1.0, backend(True), size.budget, device=device, num_items=size.num_groups)
    samples = [group.samples for group in groups]
    score: Callable[[], Any] = lambda: reference._with_logprobs(samples)  # noqa: E731
    for _ in range(num_warmup):
        score()
    samples_s["reference"] = [seconds(score) for _ in range(num_rounds)]
    shares = {side: (1 if side == "reference" else 3) * flops / min(times) / peak for side, times in samples_s.items()}
    return {
        "samples_s": samples_s,
        "tokens": sum(num_tokens_of(one) for one in samples),
        "share_of_peak": shares,
        "reference_over_actor": min(samples_s["reference"]) / min(samples_s["actor, compiled"]),
        "host_waits": {side: len(places) for side, places in waits.items()},
        "host_wait_places": waits,
    }


def described(row: Mapping[str, Any]) -> str:
    shares = ", ".join(f"{side} {share:.1%}" for side, share in row["share_of_peak"].items())
    return (
        f"{row['tokens']} tokens; share of the peak: {shares}; reference / actor "
        f"{row['reference_over_actor']:.2f}; host waits {row['host_waits']}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="*", default=["0.5B", "1.5B"], choices=["0.5B", "1.5B"])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--warmup", type=int, default=2, help="rounds that do not count")
    parser.add_argument("--compiled-alone", action="store_true", help="no actor with layers as they are")
    parser.add_argument("--gpu", default="H100", help="a product that the planner has a datasheet of")
    parser.add_argument("--tiny", action="store_true", help="a tiny model, to try the script on a CPU")
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    on_gpu = torch.cuda.is_available()
    size, device = (SMALL if options.tiny else FULL), "cuda:0" if on_gpu else "cpu:0"
    sides = {name: compiles for name, compiles in SIDES.items() if compiles or not options.compiled_alone}
    rows: dict[str, Any] = {}
    samples_s: dict[str, Sequence[float]] = {}
    for name in ["tiny"] if options.tiny else options.models:
        with tempfile.TemporaryDirectory(prefix="rlinf-trainer-gpu-") as scratch:
            write_model(Path(scratch), SHAPES[name], device.partition(":")[0])
            row = measure(
                Path(scratch),
                size,
                device,
                sides=sides,
                num_warmup=options.warmup,
                num_rounds=options.rounds,
                peak=find_gpu(options.gpu).flops_per_s,
            )
        samples_s |= {f"{name}: {side}": times for side, times in row.pop("samples_s").items()}
        rows[name] = row
        print(f"{name}: {described(row)}", flush=True)
        report(
            "trainer-gpu",
            settings={
                "device": torch.cuda.get_device_name() if on_gpu else "cpu",
                "peak": options.gpu,
                "groups": size.num_groups,
                "answers": GROUP_SIZE,
                "tokens_of_an_answer": [size.least_tokens, size.most_tokens],
                "max_tokens_per_micro_batch": size.budget,
            },
            samples_s=samples_s,
            comparisons=[
                compare(samples_s, *(f"{name}: {side}" for side in reversed(sides))) for name in rows if len(sides) > 1
            ],
            findings=rows,
            output=options.output,
        )


if __name__ == "__main__":
    main()
