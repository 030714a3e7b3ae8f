"""Ranks that share packed rows beside one rank that computes them alone: benchmarks/results/shared-rows.json.

    python -m benchmarks.learning.shared_rows

A tiny Qwen2 (4 heads, 2 of keys) with random weights is trained for 20 updates of AdamW by one rank under `replicated`,
and by 2 and 4 ranks under `replicated` and `fsdp2` (`sequence_parallel`) and `megatron` (`context_parallel`), from the
same weights with the same rows: groups of random tokens of several lengths, advantages of both signs. In float64
the differences would be those of an error; what is left in float32 alone is rounding.

For each way and dtype: the largest difference of a log-probability before the first update (nats), and the largest
differences of the first gradient, and of weights and moments after 20 updates, relative to the largest number of
their tensor.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from multiprocessing import set_forkserver_preload
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import RESULTS_FOLDER, report
from torch import Tensor
from transformers import Qwen2Config

from rlinf_workers.launchers.local.launcher import LocalLauncher
from rlinf_workers.models.language_model import ModelSettings, build_model
from rlinf_workers.models.packed import pack_without_padding
from rlinf_workers.models.trainable import TokenModel
from rlinf_workers.roles import Prompt
from rlinf_workers.roles.records.language import SampleGroup
from rlinf_workers.testing.backends import trial_worker
from rlinf_workers.testing.launchers import launched, start
from rlinf_workers.trainers.base import LossOf, ModelOutputs, OptimizerSettings, TrainingBackend
from rlinf_workers.worker import Worker

VOCAB, NUM_STEPS, NUM_SHARDS, MAX_TOKENS = 128, 20, 2, 40
CONFIG = Qwen2Config(
    vocab_size=VOCAB,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)
GRADIENT = OptimizerSettings(learning_rate=1e-3, epsilon=1.0, max_grad_norm=1e9)
"""AdamW's first average is then the gradient, but for a factor."""
ADAMW = OptimizerSettings(learning_rate=1e-3, epsilon=1e-6, weight_decay=0.1, max_grad_norm=1.0)
WAYS: dict[str, tuple[str, int, str]] = {
    f"{backend}, {size} ranks": (backend, size, dtype)
    for backend, dtype in (("replicated", "float64"), ("fsdp2", "float64"), ("megatron", ""))
    for size in (2, 4)
}
"""Backend, ranks that share rows, and the dtype beside float32; megatron's masters are float32."""
PRELOADED = ["rlinf_workers.testing.backends", "transformers.models.qwen2.modeling_qwen2"]
"""Imports of the process that ranks are forked from."""
BOUNDS = {"logprobs": 2e-6, "gradient": 1e-5, "weights": 1e-5, "moments": 1e-5}
"""Of float32."""


def groups_of(seed: int) -> list[SampleGroup]:
    """Four groups of four completions, of random tokens and lengths."""
    generator = torch.Generator().manual_seed(seed)

    def tokens(*shape: int) -> Tensor:
        return torch.randint(0, VOCAB, shape, generator=generator)

    groups = []
    for index in range(4):
        lengths = torch.randint(1, MAX_TOKENS + 1, (4, 1), generator=generator)
        mask = (torch.arange(MAX_TOKENS) < lengths).float()
        groups.append(
            SampleGroup(
                prompt=Prompt(index=index, token_ids=tokens(5 + 3 * index), reference_answer=""),
                completion_ids=tokens(4, MAX_TOKENS) * mask.long(),
                loss_mask=mask,
                rollout_logprobs=torch.zeros(4, MAX_TOKENS),
                policy_version=0,
            )
        )
    return groups


def update(backend: TrainingBackend, number: int) -> float:
    """One optimizer step over two shards of a micro-batch each; returns the norm of the gradient."""
    backend.begin(1)
    groups = groups_of(1000 + number)
    for shard in backend.shards:
        own = groups[shard::NUM_SHARDS]
        backend.backward(shard, pack_without_padding(own), loss_on(own), entropies=True)
    (num_tokens,) = backend.finish_backward()
    return backend.step(num_tokens)


def loss_on(groups: Sequence[SampleGroup]) -> LossOf:
    """A policy gradient with advantages of both signs, and an entropy bonus."""

    def loss_of(answers: ModelOutputs) -> tuple[Tensor, Sequence[float]]:
        width, dtype = answers.logprobs.shape[1], answers.logprobs.dtype
        mask = torch.cat([group.loss_mask[:, :width] for group in groups]).to(dtype)
        advantages = torch.tensor([1.0, -1.0, 0.5, -0.5], dtype=dtype).repeat(len(groups))[:, None]
        return -((advantages * answers.logprobs + 1e-3 * answers.entropies) * mask).sum(), [float(mask.sum())]

    return loss_of


class Sharing(Worker):
    """A rank of a trainer."""

    def train(self, backend: str, size: int, folder: str, dtype: str) -> dict[str, Mapping[str, Tensor]]:
        """Log-probabilities at first; the gradient, weights and moments that this rank writes."""
        probing = self._made(backend, size, folder, dtype, GRADIENT)
        logprobs = probing.forward(pack_without_padding(groups_of(0))).logprobs
        update(probing, 0)
        training = self._made(backend, size, folder, dtype, ADAMW)
        for number in range(NUM_STEPS):
            update(training, number)
        return {
            "logprobs": {"all": logprobs},
            "gradient": _ending(probing.optimizer_tensors(), "exp_avg"),
            "weights": dict(training.model_tensors()),
            "moments": _ending(training.optimizer_tensors(), "exp_avg", "exp_avg_sq"),
        }

    def _made(self, backend: str, size: int, folder: str, dtype: str, optimizer: OptimizerSettings) -> TrainingBackend:
        from rlinf_workers.trainers.fsdp2.backend import fsdp2
        from rlinf_workers.trainers.megatron.make import megatron
        from rlinf_workers.trainers.replicated.backend import ReplicatedBackend

        kind = TokenModel(ModelSettings(folder=folder, has_weights=True, dtype=dtype), 1.0)
        how: dict[str, Any] = {"optimizer": optimizer, "num_shards": NUM_SHARDS}
        if backend == "megatron":
            return megatron(kind, self, **how, context_parallel=size)
        make: Any = {"fsdp2": fsdp2, "replicated": ReplicatedBackend}[backend]
        return make(kind, self, **how, sequence_parallel=size)


def _ending(tensors: Mapping[str, Tensor], *fields: str) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.rpartition(":")[2] in fields}


def write_model(folder: Path, dtype: str) -> None:
    """The same numbers in any dtype."""
    CONFIG.save_pretrained(folder)
    model = build_model(ModelSettings(folder=str(folder), has_weights=False, seed=3), torch.device("cpu"))
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(0.15 * torch.randn(weight.shape, generator=generator) + (1.0 if "norm" in name else 0.0))
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def difference(what: str, actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """The largest one; of tensors relative to the largest number of each."""
    assert actual.keys() == expected.keys(), what
    gaps = []
    for name, tensor in expected.items():
        gap = (actual[name].double() - tensor.double()).abs().max()
        gaps.append(float(gap if what == "logprobs" else gap / tensor.abs().max()))
    return max(gaps)


def shared(
    folder: Path, name: str, model: Path, dtype: str, alone: Mapping[str, Mapping[str, Tensor]]
) -> dict[str, float]:
    """The differences of ranks that share rows from one rank alone."""
    from benchmarks.learning.shared_rows import Sharing as Importable

    backend, size, _ = WAYS[name]
    with launched(partial(LocalLauncher, forks=True)) as launcher:
        ranks = start(launcher, folder, Importable, num_ranks=size, num_ranks_per_replica=size)
        results = ranks.call("train", backend, size, str(model), dtype)
    together = {what: {key: tensor for result in results for key, tensor in result[what].items()} for what in alone}
    return {what: difference(what, together[what], alone[what]) for what in alone}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=sorted(WAYS), help="the others keep what was measured before")
    parser.add_argument("--output", type=Path, default=RESULTS_FOLDER / "shared-rows.json")
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    set_forkserver_preload(PRELOADED)
    before = json.loads(chosen.output.read_text())["findings"]["by_way"] if chosen.output.exists() else {}
    findings: dict[str, dict[str, dict[str, float]]] = {name: before.get(name, {}) for name in WAYS}
    names = chosen.only or list(WAYS)
    with tempfile.TemporaryDirectory() as scratch:
        one = Sharing()
        one._host = trial_worker()._host
        one.identity = one._host.identity
        for dtype in ("float32", "float64"):
            ways = [name for name in names if dtype in ("float32", WAYS[name][2])]
            if not ways:
                continue
            model = Path(scratch) / dtype
            write_model(model, dtype)
            alone = one.train("replicated", 1, str(model), dtype)
            for name in ways:
                folder = Path(scratch) / f"{dtype} {name}"
                folder.mkdir()
                findings[name][dtype] = gaps = shared(folder, name, model, dtype, alone)
                print(f"{name}, {dtype}:", " ".join(f"{what} {gap:.1e}" for what, gap in gaps.items()), flush=True)
    measured = {name: one for name, one in findings.items() if one}
    worst = {what: max(one["float32"][what] for one in measured.values()) for what in BOUNDS}
    report(
        "shared-rows",
        settings={"model": CONFIG.to_diff_dict(), "num_steps": NUM_STEPS, "bounds": BOUNDS},
        samples_s={},
        comparisons=[],
        findings={"by_way": measured, "worst_in_float32": worst},
        output=chosen.output,
    )


if __name__ == "__main__":
    main()
