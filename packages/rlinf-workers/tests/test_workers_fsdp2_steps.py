"""Twenty updates of a policy and its critic on 2 and 4 ranks, in float32 and float64, beside those of one process.

The bounds in float64 say that what is left in float32 is the rounding of sums in another order.
"""

import dataclasses

import pytest
import torch

from rlinf_workers.launchers.local.launcher import LocalLauncher
from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.models.sequences import SequenceBatch
from rlinf_workers.models.trainable import TokenModel, ValueModel
from rlinf_workers.testing.architectures import tiny_architecture
from rlinf_workers.testing.backends import trial_worker
from rlinf_workers.testing.launchers import launched, start
from rlinf_workers.testing.weight_sync import parts_of
from rlinf_workers.trainers.base import OptimizerSettings
from rlinf_workers.trainers.fsdp2.backend import fsdp2
from rlinf_workers.trainers.replicated.backend import ReplicatedBackend
from rlinf_workers.worker import Worker

SETTINGS = OptimizerSettings(learning_rate=1e-3, epsilon=1e-4, weight_decay=0.1, max_grad_norm=1.0)
NUM_STEPS, NUM_BATCHES = 20, 8
BOUNDS = {"float32": (1e-5, 1e-5), "float64": (1e-13, 1e-13)}
"""Largest differences of losses and norms, and of weights, relative to the largest."""


def batch_of(step: int, number: int) -> SequenceBatch:
    """Four completions of a prompt; some prompts are padded, some completions have one token."""
    generator = torch.Generator().manual_seed(100 * step + number)
    width = 1 + number % 4
    prompt_mask = torch.ones(1, 5, dtype=torch.int64)
    prompt_mask[:, : number % 3] = 0
    return SequenceBatch(
        prompt_ids=torch.randint(0, 19, (1, 5), generator=generator),
        prompt_mask=prompt_mask,
        completion_ids=torch.randint(0, 19, (4, width), generator=generator),
        loss_mask=torch.ones(4, width),
    )


def loss_of(answers):
    """Advantages 1 and -1 by turns for a policy, a target of 1 for a critic."""
    signs = torch.tensor([1.0, -1.0, 1.0, -1.0])[:, None]
    size = answers.logprobs if answers.logprobs.numel() else answers.values
    loss = (answers.values - 1).square().sum() - (signs * answers.logprobs).sum() + 0 * size.sum()
    return loss, [float(loss.detach())]


def learn(make, worker, model: ModelSettings, num_ranks: int, shard: int | None) -> tuple[list[float], list]:
    """Losses and norms of all updates, and the backends.

    Args:
        shard: where all micro-batches go; None: each has its own, of which a rank has some.
    """
    kinds = (TokenModel(model, 1.0), ValueModel(model))
    backends = [make(kind, worker, optimizer=SETTINGS, num_shards=num_ranks) for kind in kinds]
    backends[1].start_from(backends[0])
    losses_and_norms = []
    for step in range(NUM_STEPS):
        for backend in backends:
            backend.begin(1)
            for number in range(NUM_BATCHES):
                own = number % num_ranks if shard is None else shard
                if own in backend.shards:
                    backend.backward(own, batch_of(step, number), loss_of)
            losses_and_norms += [*backend.finish_backward(), backend.step(NUM_BATCHES)]
    return losses_and_norms, backends


class Learner(Worker):
    def learn(self, model: ModelSettings) -> list[float]:
        losses_and_norms, self._learned = learn(fsdp2, self, model, self.num_ranks, None)
        return losses_and_norms

    def parts(self, which: int) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self._learned[which].weights().items()}

    def layout_of(self, which: int):
        return self._learned[which].layout()


def off_by(actual: list[float], expected: list[float]) -> float:
    """Relative to the largest: a loss may be the difference of nearly equal sums, and as small as one likes."""
    return max(abs(a - b) for a, b in zip(actual, expected, strict=True)) / max(map(abs, expected))


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_twenty_updates_are_those_of_one_process(tmp_path, num_ranks):
    model = tiny_architecture("qwen2", tmp_path / "model", tie_word_embeddings=True)
    worst: dict[str, tuple[float, float]] = {}
    with launched(LocalLauncher) as launcher:
        group = start(launcher, tmp_path / "ranks", Learner, num_ranks=num_ranks)
        for dtype in BOUNDS:
            settings = dataclasses.replace(model, dtype=dtype, has_weights=False)
            expected, backends = learn(ReplicatedBackend, trial_worker(), settings, 1, 0)
            actual = group.call("learn", settings)
            assert all(numbers == actual[0] for numbers in actual)
            numbers = max(off_by(actual[0][kind::4], expected[kind::4]) for kind in range(4))
            weights = 0.0
            for which, backend in enumerate(backends):
                layout = group.call("layout_of", which)[0]
                whole = {name: tensor.detach() for name, tensor in backend.weights().items()}
                for mine, theirs in zip(group.call("parts", which), parts_of(whole, layout), strict=True):
                    for name, tensor in mine.items():
                        if tensor.numel():
                            off = (tensor - theirs[name]).abs().max() / whole[name].abs().max()
                            weights = max(weights, float(off))
            worst[dtype] = (numbers, weights)
    print(num_ranks, worst)
    for dtype, bounds in BOUNDS.items():
        assert all(actual <= bound for actual, bound in zip(worst[dtype], bounds, strict=True)), (dtype, worst)
