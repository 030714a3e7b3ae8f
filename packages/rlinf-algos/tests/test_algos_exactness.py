"""One batch of 64 sequences, whole or cut into 4 micro-batches of 2 ranks, padded more or less: one loss, one gradient.

A causal transformer of one layer, from its logits to the aggregated loss. The second rank is a loop in this process,
and once a process of its own with gloo between them (this file is also the program of those ranks).
"""

import pathlib
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from rlinf_algos import (
    cispo_loss,
    constant_length_mean,
    entropy_bonus,
    entropy_of_logits,
    grpo_advantages,
    gspo_loss,
    kl_k3,
    ppo_clip_loss,
    sequence_mean_token_mean,
    sequence_mean_token_sum,
    token_logprobs,
    token_mean,
)
from rlinf_algos.aggregation import count_tokens_and_sequences

NUM_SEQUENCES, NUM_MICRO_BATCHES, NUM_RANKS = 64, 4, 2
VOCAB, WIDTH, MAX_TOKENS = 23, 8, 20
AGGREGATIONS = ["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant_length_mean"]
LAYOUTS = ["padded", "padded wider"]


@dataclass(frozen=True)
class Sequence:
    """One prompt with its completion."""

    token_ids: Tensor  # [L] int64
    trained: Tensor  # [L] bool: tokens of the completion, but for a gap (a tool's output)
    advantage: Tensor  # scalar
    drift: Tensor  # [L]: what the proximal log-probabilities differ by


@dataclass(frozen=True)
class Rows:
    """A micro-batch; position t predicts token t + 1 of the same sequence."""

    token_ids: Tensor  # [B, T]
    loss_mask: Tensor  # [B, T] bool, of the predicted tokens
    advantages: Tensor  # [B, T]
    drift: Tensor  # [B, T]


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCAB, WIDTH)
        self.places = nn.Embedding(MAX_TOKENS, WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, rows: Rows) -> Tensor:
        hidden = self.tokens(rows.token_ids) + self.places(torch.arange(rows.token_ids.shape[1]) % MAX_TOKENS)
        q, k, v = self.mix(hidden).chunk(3, dim=-1)
        scores = q @ k.mT / WIDTH**0.5
        weights = scores.masked_fill(~torch.ones_like(scores).tril().bool(), -1e9)
        return self.head(hidden + weights.softmax(-1) @ v)


def make_batch(dtype: torch.dtype) -> tuple[Transformer, list[Sequence]]:
    torch.manual_seed(11)
    model = Transformer().to(dtype)
    # one more than GRPO's, so that the loss is no small difference of large sums, whose relative error says nothing
    advantages = 1.0 + grpo_advantages(torch.randint(0, 2, (NUM_SEQUENCES // 8, 8)).to(dtype)).flatten()
    batch = []
    for s in range(NUM_SEQUENCES):
        prompt, completion = int(torch.randint(1, 5, ())), int(torch.randint(1, 14, ()))
        trained = torch.arange(prompt + completion) >= prompt
        if completion > 6:
            trained[prompt + 2 : prompt + 4] = False
        if s == 5:
            trained[:] = False  # filtered out: counts nowhere
        drift = 0.3 * torch.randn(len(trained), dtype=dtype)
        batch.append(Sequence(torch.randint(0, VOCAB, trained.shape), trained, advantages[s], drift))
    return model, batch


def lay_out(batch: list[Sequence], layout: str, dtype: torch.dtype) -> Rows:
    """One sequence a row."""
    width = max(len(sequence.token_ids) for sequence in batch) + (7 if layout == "padded wider" else 2)
    shape = len(batch), width
    token_ids, loss_mask = torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.bool)
    advantages, drift = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
    for row, sequence in enumerate(batch):
        stop = len(sequence.token_ids)
        token_ids[row, :stop], loss_mask[row, : stop - 1] = sequence.token_ids, sequence.trained[1:]
        advantages[row, :stop], drift[row, :stop] = sequence.advantage, sequence.drift
    return Rows(token_ids, loss_mask, advantages, drift)


def loss_of(model: Transformer, rows: Rows, policy_loss: str, aggregation: str, totals: tuple[int, int]) -> Tensor:
    logits = model(rows)
    next_ids = rows.token_ids.roll(-1, dims=1)
    mask = rows.loss_mask
    policy = token_logprobs(logits, next_ids, loss_mask=mask)
    proximal = policy.detach() + rows.drift
    if policy_loss == "gspo":
        loss = gspo_loss(policy, proximal, rows.advantages, mask, clip_low=0.1, clip_high=0.1)
    else:
        loss = {"ppo": ppo_clip_loss, "cispo": cispo_loss}[policy_loss](policy, proximal, rows.advantages, mask)
    entropy = entropy_bonus(entropy_of_logits(logits, loss_mask=mask), mask, coef=0.01)
    terms = loss.loss_terms + entropy + 0.1 * kl_k3(policy, policy.detach() - rows.drift, mask)
    num_tokens, num_sequences = totals
    if aggregation == "token_mean":
        return token_mean(terms, mask, num_tokens)
    if aggregation == "constant_length_mean":
        return constant_length_mean(terms, mask, num_sequences, MAX_TOKENS)
    function = {
        "sequence_mean_token_mean": sequence_mean_token_mean,
        "sequence_mean_token_sum": sequence_mean_token_sum,
    }[aggregation]
    return function(terms, mask, num_sequences)


def micro_batches(batch: list[Sequence], rank: int, layout: str, dtype: torch.dtype) -> list[Rows]:
    """The micro-batches of one rank: every second sequence, a quarter of them at a time."""
    mine = batch[rank::NUM_RANKS]
    return [lay_out(mine[i::NUM_MICRO_BATCHES], layout, dtype) for i in range(NUM_MICRO_BATCHES)]


def counts(parts: list[Rows]) -> Tensor:
    each = [torch.stack(count_tokens_and_sequences(p.loss_mask)) for p in parts]
    return torch.stack(each).sum(0)


def train_rank(model: Transformer, parts: list[Rows], policy_loss: str, aggregation: str, totals: Tensor) -> Tensor:
    """[loss, gradient], summed over the rank's micro-batches."""
    num_tokens, num_sequences = (int(total) for total in totals)
    model.zero_grad()
    loss = torch.zeros((), dtype=next(model.parameters()).dtype)
    for part in parts:
        term = loss_of(model, part, policy_loss, aggregation, (num_tokens, num_sequences))
        term.backward()
        loss += term.detach()
    return torch.cat([loss[None], *(p.grad.flatten() for p in model.parameters() if p.grad is not None)])


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return float((actual - expected).norm() / expected.norm())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@pytest.mark.parametrize("policy_loss", ["ppo", "gspo", "cispo"])
def test_loss_and_gradient_do_not_depend_on_the_layout(policy_loss, aggregation, layout):
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-13)):
        model, batch = make_batch(dtype)
        whole = [lay_out(batch, "padded", dtype)]
        totals = counts(whole)
        assert totals[1] == NUM_SEQUENCES - 1
        expected = train_rank(model, whole, policy_loss, aggregation, totals)
        ranks = [micro_batches(batch, rank, layout, dtype) for rank in range(NUM_RANKS)]
        assert torch.equal(sum((counts(parts) for parts in ranks), torch.zeros(2, dtype=torch.int64)), totals)
        actual = sum(train_rank(model, parts, policy_loss, aggregation, totals) for parts in ranks)
        assert isinstance(actual, Tensor)
        assert relative_error(actual[:1], expected[:1]) < tolerance
        assert relative_error(actual[1:], expected[1:]) < tolerance


def test_the_mean_of_means_of_micro_batches_would_be_seen():
    """The tolerance above means something: averaging each micro-batch by its own count is wrong by several per cent."""
    model, batch = make_batch(torch.float64)
    whole = [lay_out(batch, "padded", torch.float64)]
    expected = train_rank(model, whole, "ppo", "token_mean", counts(whole))
    parts = micro_batches(batch, 0, "padded", torch.float64) + micro_batches(batch, 1, "padded", torch.float64)
    naive = sum(train_rank(model, [part], "ppo", "token_mean", counts([part])) / len(parts) for part in parts)
    assert isinstance(naive, Tensor)
    assert relative_error(naive[1:], expected[1:]) > 1e-2


def test_two_gloo_processes_get_the_loss_and_gradient_of_one(tmp_path):
    command = [sys.executable, __file__, str(tmp_path)]
    ranks = [subprocess.Popen([*command, str(rank)], stderr=subprocess.PIPE, text=True) for rank in range(NUM_RANKS)]
    for process in ranks:
        _, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
    model, batch = make_batch(torch.float32)
    whole = [lay_out(batch, "padded", torch.float32)]
    for aggregation in AGGREGATIONS:
        expected = train_rank(model, whole, "gspo", aggregation, counts(whole))
        for rank in range(NUM_RANKS):
            actual = torch.load(tmp_path / f"{aggregation}.{rank}", weights_only=True)
            assert relative_error(actual[:1], expected[:1]) < 1e-6
            assert relative_error(actual[1:], expected[1:]) < 1e-6


def run_rank(folder: pathlib.Path, rank: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=NUM_RANKS)
    model, batch = make_batch(torch.float32)
    parts = micro_batches(batch, rank, "padded wider", torch.float32)
    totals = counts(parts)
    dist.all_reduce(totals)
    for aggregation in AGGREGATIONS:
        result = train_rank(model, parts, "gspo", aggregation, totals)
        dist.all_reduce(result)
        torch.save(result, folder / f"{aggregation}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    run_rank(pathlib.Path(sys.argv[1]), int(sys.argv[2]))
