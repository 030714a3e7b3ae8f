"""What the gap of engine and trainer costs a training step.

    python -m benchmarks.throughput.logprob_gap

Side by side in this process: forward, loss and backward of a micro-batch as the actor has it, and the measuring of the
gap alone, once with the tokens of sort-grpo and its model, once with those of a long run behind a small model. Seconds
are of this process's CPU time, so that other work on the machine does not count.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import compare, interleave, report
from benchmarks.throughput.batches import VOCAB_SIZE, made_model

from rlinf_algos import preset
from rlinf_workers.models.sequences import SequenceBatch
from rlinf_workers.models.trainable import TokenModel
from rlinf_workers.roles.language.actor_loss import ActorLoss
from rlinf_workers.roles.language.micro_batches import MicroBatch, Tokens

SHAPES = {"sort": (16, 8, 9, 96, 3), "long": (2, 8, 1024, 128, 2)}
"""Name -> groups, completions of each, tokens of each, hidden size and layers of the model."""


def micro_batch(num_groups: int, group_size: int, num_tokens: int) -> MicroBatch:
    """Tokens that say nothing, with an advantage each."""
    generator = torch.Generator().manual_seed(0)
    num_rows = num_groups * group_size
    sequences = SequenceBatch(
        prompt_ids=torch.randint(VOCAB_SIZE, (num_groups, 16), generator=generator),
        prompt_mask=torch.ones(num_groups, 16, dtype=torch.int64),
        completion_ids=torch.randint(VOCAB_SIZE, (num_rows, num_tokens), generator=generator),
        loss_mask=torch.ones(num_rows, num_tokens),
    )
    tokens = Tokens(
        sequences=sequences,
        prompts=tuple(range(num_rows)),
        rows=tuple(range(num_rows)),
        advantages=torch.randn(num_rows, generator=generator),
        rollout_logprobs=-torch.rand(num_rows, num_tokens, generator=generator),
        token_versions=torch.zeros(num_rows, num_tokens, dtype=torch.int64),
        ref_logprobs=None,
        proximal_logprobs=None,
        values=None,
        returns=None,
        computed=(0, 0),  # nobody counts them here
    )
    return MicroBatch(shard=0, divisor=1.0, num_tokens=num_rows * num_tokens, for_policy=tokens, for_critic=None)


def passed(kind: TokenModel, model: Any, loss: ActorLoss, batch: MicroBatch, _: int) -> float:
    """Seconds of forward, loss and backward."""
    assert batch.for_policy is not None
    start_s = time.process_time()
    total, _totals = loss.of(batch, kind.answers(model, batch.for_policy.sequences, entropies=False))
    total.backward()
    return time.process_time() - start_s


def measured(loss: ActorLoss, batch: MicroBatch, _: int) -> float:
    """Seconds of the gap alone, its worst token new each time."""
    assert batch.for_policy is not None
    anchor = torch.zeros_like(batch.for_policy.rollout_logprobs)
    loss.take_worst()
    start_s = time.process_time()
    loss._gap(batch.for_policy, anchor)
    return time.process_time() - start_s


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    sides = {}
    for name, (num_groups, group_size, num_tokens, hidden_size, num_layers) in SHAPES.items():
        (kind, model), loss = made_model(hidden_size, num_layers), ActorLoss(preset("grpo"))
        batch = micro_batch(num_groups, group_size, num_tokens)
        sides[f"{name}, gap"] = partial(measured, loss, batch)
        sides[f"{name}, micro-batch"] = partial(passed, kind, model, loss, batch)
    samples_s = interleave(sides, num_warmup=2, num_rounds=options.rounds)
    comparisons = [compare(samples_s, f"{name}, gap", f"{name}, micro-batch") for name in SHAPES]
    report(
        "logprob-gap",
        settings={"shapes": {name: list(shape) for name, shape in SHAPES.items()}},
        samples_s=samples_s,
        comparisons=comparisons,
        findings={"share": {name: one.median_of_ratios for name, one in zip(SHAPES, comparisons, strict=True)}},
        output=options.output,
    )


if __name__ == "__main__":
    main()
