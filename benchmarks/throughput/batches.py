"""Padding and waiting of a GRPO step's micro-batches, padded or packed, and the time of their passes.

    python -m benchmarks.throughput.batches

Lengths are drawn like those of GSM8K: prompts of 60 to 150 tokens, completions log-normal and cut to 50 to 400; half of
their variance is the problem's, since a hard one has long answers throughout. The counts need no model: 512 prompts x 8
over 2, 4 and 8 ranks. A token is waste where it is padding, or where a rank has nothing to do while the fullest works
on: at the end of an update (replicated), or in each of its passes (fsdp2, whose ranks pass in step). Times are forward
and backward passes of one rank in this process, side by side, by a Qwen2 made for it, 8 prompts x 8.
Target: at most 5 % waste.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import compare, interleave, report

from rlinf_workers.balance import balanced
from rlinf_workers.models import ModelSettings
from rlinf_workers.models.packed import pack_without_padding
from rlinf_workers.models.sequences import pack_groups
from rlinf_workers.models.trainable import CompletionBatch, TokenModel
from rlinf_workers.roles import Prompt
from rlinf_workers.roles.language.micro_batches import bins_within, filled_up, num_tokens_of, split
from rlinf_workers.roles.records.language import SampleGroup

GROUP_SIZE, NUM_PROMPTS, BUDGET, PADDED_GROUPS = 8, 512, 8192, 4
SHORTEST, LONGEST, MEDIAN, SPREAD = 50, 400, 150, 0.5
TARGET = 0.05
VOCAB_SIZE = 512


def drawn_groups(num_groups: int, seed: int) -> list[SampleGroup]:
    """Groups of a step; token ids say nothing."""
    generator = torch.Generator().manual_seed(seed)
    groups = []
    for index in range(num_groups):
        prompt_length = int(torch.randint(60, 151, (), generator=generator))
        normal = torch.randn((), generator=generator) + torch.randn(GROUP_SIZE, generator=generator)
        lengths = (MEDIAN * (SPREAD * normal / 2**0.5).exp()).long().clamp(SHORTEST, LONGEST)
        mask = (torch.arange(LONGEST) < lengths[:, None]).float()
        ids = torch.randint(VOCAB_SIZE, (GROUP_SIZE, LONGEST), generator=generator)
        groups.append(
            SampleGroup(
                prompt=Prompt(index=index, token_ids=ids[0, :prompt_length], reference_answer=""),
                completion_ids=ids,
                loss_mask=mask,
                rollout_logprobs=torch.zeros_like(mask),
                policy_version=0,
            )
        )
    return groups


def padded_tokens(groups: Sequence[SampleGroup]) -> int:
    """What a padded micro-batch computes: all places of its prompts and of its completions but the last."""
    batch = pack_groups(groups)
    return batch.prompt_ids.numel() + batch.completion_ids[:, 1:].numel()


def shares_of(groups: Sequence[SampleGroup], num_ranks: int, *, balances: bool) -> list[list[SampleGroup]]:
    """The groups of each rank."""
    shards = [group.index % num_ranks for group in groups]
    if balances:
        shards = balanced([num_tokens_of(group) for group in groups], num_ranks)
    return [[group for group, shard in zip(groups, shards, strict=True) if shard == rank] for rank in range(num_ranks)]


def passes_of(form: str, mine: Sequence[SampleGroup]) -> list[int]:
    """Tokens that each pass of a rank computes, as the actor cuts them."""
    if form == "padded":
        return [padded_tokens(mine[i : i + PADDED_GROUPS]) for i in range(0, len(mine), PADDED_GROUPS)]
    subsets = [group.subset(rows) for group in mine for rows in split(group, BUDGET)]
    if form == "packed":
        return [sum(map(num_tokens_of, subset)) for subset in filled_up(subsets, num_tokens_of, BUDGET)]
    sizes = [num_tokens_of(subset) for subset in subsets]
    return [sum(sizes[item] for item in items) for items in bins_within(sizes, BUDGET)]


def waste(form: str, num_ranks: int, num_steps: int) -> dict[str, float]:
    """Shares of the tokens that ranks could have computed in the time of the fullest, means over steps."""
    rows = []
    for seed in range(num_steps):
        groups = drawn_groups(NUM_PROMPTS, seed)
        needed = sum(map(num_tokens_of, groups))
        passes = [passes_of(form, mine) for mine in shares_of(groups, num_ranks, balances=form == "balanced")]
        computed = sum(map(sum, passes))
        at_end = num_ranks * max(map(sum, passes))
        each_pass = num_ranks * sum(max(turn) for turn in zip_longest(*passes, fillvalue=0))
        rows.append((1 - needed / computed, 1 - needed / at_end, 1 - needed / each_pass))
    names = ("padding", "padding_and_waiting_at_the_end", "padding_and_waiting_in_each_pass")
    return {name: statistics.mean(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def timed_pass(kind: TokenModel, model: Any, form: str, index: int) -> float:
    """Seconds of the forward and backward passes of one rank's groups."""
    groups = drawn_groups(8, index)
    if form == "padded":
        batches: list[CompletionBatch] = [pack_groups(groups[i : i + 2]) for i in range(0, len(groups), 2)]
    else:
        batches = [pack_without_padding(part) for part in filled_up(groups, num_tokens_of, BUDGET // 2)]
    start_s = time.perf_counter()
    for batch in batches:
        (kind.answers(model, batch, entropies=False).logprobs * batch.loss_mask).sum().backward()
    return time.perf_counter() - start_s


def made_model(hidden_size: int, num_layers: int) -> tuple[TokenModel, Any]:
    from transformers import AutoModelForCausalLM, Qwen2Config

    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=hidden_size,
        intermediate_size=8 * hidden_size // 3,
        num_hidden_layers=num_layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    return TokenModel(ModelSettings(folder="", has_weights=False), 1.0), AutoModelForCausalLM.from_config(config).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=8, help="steps that are counted")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--num-layers", type=int, default=4)
    parser.add_argument("--output", type=Path, default=None)
    options = parser.parse_args()
    torch.set_num_threads(1)
    table = {
        f"{form}, {num_ranks} ranks": waste(form, num_ranks, options.steps)
        for form in ("padded", "packed", "balanced")
        for num_ranks in (2, 4, 8)
    }
    for name, shares in table.items():
        print(f"{name:<20}", ", ".join(f"{share:.1%} {what}" for what, share in shares.items()))
    kind, model = made_model(options.hidden_size, options.num_layers)
    sides = {form: partial(timed_pass, kind, model, form) for form in ("padded", "packed")}
    samples_s = interleave(sides, num_warmup=1, num_rounds=options.rounds)
    report(
        "batches",
        settings={
            "prompts": NUM_PROMPTS,
            "group_size": GROUP_SIZE,
            "budget_tokens": BUDGET,
            "padded_groups": PADDED_GROUPS,
            "completion_tokens": {"median": MEDIAN, "sigma_of_log": SPREAD, "from": SHORTEST, "to": LONGEST},
            "num_parameters": sum(parameter.numel() for parameter in model.parameters()),
            "target_waste": TARGET,
        },
        samples_s=samples_s,
        comparisons=[compare(samples_s, "padded", "packed")],
        findings={
            "waste": table,
            "meets_target": max(max(shares.values()) for name, shares in table.items() if "balanced" in name) <= TARGET,
        },
        output=options.output,
    )


if __name__ == "__main__":
    main()
