"""Rows of branched episodes give the log-probabilities and gradients of their histories computed one by one."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings, strategies as st
from transformers import AutoConfig, AutoModelForCausalLM
from workers_trees import trees, turn, written

from rlinf_workers.agents.records import AgentTrajectory
from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.models.packed import num_computed_tokens, pack_without_padding
from rlinf_workers.models.sequences import pack_groups
from rlinf_workers.models.trainable import TokenModel
from rlinf_workers.roles.language.episodes import group_of
from rlinf_workers.roles.language.micro_batches import split
from rlinf_workers.roles.records.language import Prompt

TEMPERATURE = 0.8
SHAPE = {
    "vocab_size": 23,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
WINDOWS = {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1}
BOUNDS = {torch.float64: 1e-12, torch.float32: 1e-6}
"""Largest difference of gradients, relative to the largest element of all."""
TOKENS = st.integers(2, 22)


def model_of(dtype=torch.float64, name="qwen2", **options):
    torch.manual_seed(0)
    config = AutoConfig.for_model(name, **SHAPE, **options)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for module in model.modules():  # norms compute in float32 whatever the weights are
        if type(module).__name__ == "Qwen2RMSNorm":
            module.forward = lambda x, norm=module: (
                norm.weight * x * (x.square().mean(-1, keepdim=True) + norm.variance_epsilon).rsqrt()
            )
    return model


def group(index, trajectories):
    prompt = Prompt(index=index, token_ids=torch.tensor([1, 4]), reference_answer="")
    return group_of(prompt, trajectories, policy_version=0)


def gradients(model, loss):
    model.zero_grad()
    loss.backward()
    return torch.cat([parameter.grad.flatten().clone() for parameter in model.parameters()])


def loss_of_leaves(model, groups, weights):
    """The weighted log-probabilities of the tokens with a loss, one history at a time; in the order of the rows."""
    losses = []
    for one, weight in zip(groups, weights, strict=True):
        for row, length in enumerate(one.row_lengths.tolist()):
            ids = torch.cat([one.prompt.token_ids, one.completion_ids[row, :length]])
            if not one.loss_mask[row].any():
                continue
            logits = model(input_ids=ids[None], use_cache=False).logits[0, len(one.prompt.token_ids) - 1 : -1]
            logprobs = (logits / TEMPERATURE).log_softmax(-1).gather(1, one.completion_ids[row, :length, None])[:, 0]
            losses.append((logprobs * weight[row, :length] * one.loss_mask[row, :length]).sum())
    return torch.stack(losses).sum()


def loss_of_batches(model, batches, weights):
    kind = TokenModel(ModelSettings(folder="", has_weights=False), TEMPERATURE)
    losses = []
    for batch, weight in zip(batches, weights, strict=True):
        logprobs = kind.answers(model, batch, entropies=False).logprobs
        losses.append((logprobs * batch.loss_mask * weight[:, : logprobs.shape[1]]).sum())
    return torch.stack(losses).sum()


def check_equal(model, groups, pack):
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(1)
    width = max(one.loss_mask.shape[1] for one in groups)
    weights = [torch.rand(len(one.loss_mask), width, generator=generator, dtype=dtype) for one in groups]
    expected_loss = loss_of_leaves(model, groups, weights)
    expected = gradients(model, expected_loss)
    if pack == "split":
        parts = [
            (one.subset(rows), weight[rows])
            for one, weight in zip(groups, weights, strict=True)
            for rows in split(one, 14)
        ]
        batches, weights = [pack_without_padding([part]) for part, _ in parts], [weight for _, weight in parts]
    else:
        batches, weights = [pack(groups)], [torch.cat(weights)]
    loss = loss_of_batches(model, batches, weights)
    computed = gradients(model, loss)
    torch.testing.assert_close(loss, expected_loss, rtol=BOUNDS[dtype], atol=BOUNDS[dtype])
    torch.testing.assert_close(computed, expected, rtol=0, atol=BOUNDS[dtype] * float(expected.abs().max()))


def are_trained(groups):
    return any(bool(one.loss_mask.any()) for one in groups)


@pytest.mark.parametrize("pack", [pack_without_padding, pack_groups, "split"])
@pytest.mark.parametrize("dtype", BOUNDS)
def test_branched_episodes_equal_their_leaves(pack, dtype):
    model = model_of(dtype)

    @settings(max_examples=20, deadline=None)
    @given(st.lists(st.lists(trees(tokens=TOKENS), min_size=1, max_size=2), min_size=1, max_size=2))
    def check(drawn):
        groups = [group(index, trajectories) for index, trajectories in enumerate(drawn)]
        if are_trained(groups):
            check_equal(model, groups, pack)

    check()


def chain():
    """Branches of branches: the last rows share with rows that share themselves."""
    nodes = [
        written("user", [1, 4, 7], -1),
        turn([5, 2], 0),
        written("tool", [7, 9, 9], 1),
        turn([8, 2], 2),
        turn([9, 3, 2], 2),
        written("tool", [12, 13], 4),
        turn([3], 5),
        turn([4, 6, 2], 5),
        written("tool", [11], 7),
        turn([17, 2], 8),
        turn([18, 2], 1),
    ]
    return AgentTrajectory(nodes=nodes, reward=1.0)


@pytest.mark.parametrize("pack", [pack_without_padding, pack_groups])
def test_layers_with_windows_see_the_tokens_before_a_branch(pack):
    check_equal(model_of(**WINDOWS), [group(0, [chain(), chain()])], pack)


def test_what_rows_share_is_computed_once():
    nodes = chain().nodes
    whole = group(0, [AgentTrajectory(nodes=nodes)])
    # All nodes but the last token of each leaf, none of which is shared: 3 + 2 + 3 + 2 + 3 + 2 + 1 + 3 + 1 + 2 + 2 - 4.
    assert num_computed_tokens(whole) == sum(len(node.token_ids) for node in nodes) - 4
    assert len(pack_without_padding([whole]).token_ids) == num_computed_tokens(whole)
    alone = dataclasses.replace(whole, shared=None, shared_with=None)
    saved = num_computed_tokens(alone) - num_computed_tokens(whole)
    assert saved == int(whole.shared.sum())
    blocks = pack_without_padding([whole]).attention.blocks
    assert sum(len(block.queries) for block in blocks) == 1 + len(whole.loss_mask), "each row is computed in one call"


@settings(max_examples=100, deadline=None)
@given(st.lists(trees(), min_size=1, max_size=3), st.integers(1, 40))
def test_tokens_computed_are_those_of_the_tree_without_what_nothing_needs(trajectories, limit):
    whole = group(0, trajectories)
    needed = set()  # (episode, history) of each token whose state some output needs
    for number, trajectory in enumerate(trajectories):
        for leaf in trajectory.leaves():
            history, path = trajectory.token_ids(leaf), trajectory.path(leaf)
            ends = [len(trajectory.token_ids(one)) for one in path if trajectory.nodes[one].author == "policy"]
            for end in range(len(whole.prompt.token_ids) + 1, max(ends, default=0)):
                node = next(one for one in path if len(trajectory.token_ids(one)) >= end)
                needed.add((number, node, tuple(history[:end])))
    assert num_computed_tokens(whole) == len(whole.prompt.token_ids) + len(needed)
    rows = list(range(len(whole.loss_mask)))
    parts = split(whole, limit)
    assert [row for part in parts for row in rows[part]] == rows
    for part in parts:
        assert num_computed_tokens(whole.subset(part)) <= limit or part.stop - part.start == 1


def test_a_row_without_a_loss_is_computed_as_far_as_others_share_it():
    whole = group(0, [chain()])
    mask = whole.loss_mask.clone()
    mask[0] = 0
    filtered = dataclasses.replace(whole, loss_mask=mask)
    # Nothing needs the turn [8, 2] of the first row any more.
    assert num_computed_tokens(whole) - num_computed_tokens(filtered) == 1
    check_equal(model_of(), [filtered], pack_without_padding)


def test_a_group_without_any_loss_can_be_computed():
    whole = group(0, [AgentTrajectory(nodes=chain().nodes, cause="service")])
    model = model_of()
    kind = TokenModel(ModelSettings(folder="", has_weights=False), TEMPERATURE)
    for pack in (pack_without_padding, pack_groups):
        batch = pack([whole])
        assert not (kind.answers(model, batch, entropies=False).logprobs * batch.loss_mask).any()
