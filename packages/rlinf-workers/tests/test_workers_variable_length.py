"""Variable-length attention gives what blocks of sequences give, with one kernel call a layer. A kernel in plain torch
takes the place of the GPU's."""

import pytest
import torch
from test_workers_packed import GROUPS, ROUNDING, check_equal, model_of
from test_workers_trees import chain, group

from rlinf_workers.models import variable_length
from rlinf_workers.models.packed import pack_without_padding
from rlinf_workers.models.packed_attention import PackedAttention
from rlinf_workers.models.variable_length import kernel_for

TREES = pack_without_padding([*GROUPS, group(3, [chain(), chain()])])


class PlainKernel:
    """The formula of attention for one sequence and head at a time, with the arguments of torch's kernel."""

    def __init__(self):
        self.num_calls = 0

    def __call__(self, query, key, value, query_ends, key_ends, most_queries, most_keys, *, scale, window_size):
        self.num_calls += 1
        left, right = window_size
        assert right == 0 and query_ends.dtype == key_ends.dtype == torch.int32
        assert int(query_ends.diff().max()) == most_queries and int(key_ends.diff().max()) == most_keys
        shared = query.shape[1] // key.shape[1]
        outputs = []
        for number in range(len(query_ends) - 1):
            q, k, v = (
                tensor[ends[number] : ends[number + 1]]
                for tensor, ends in ((query, query_ends), (key, key_ends), (value, key_ends))
            )
            distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
            hidden = (distance < 0) | ((distance > left) if left >= 0 else torch.zeros_like(distance, dtype=torch.bool))
            heads = [
                (q[:, h] @ k[:, h // shared].T * scale).masked_fill(hidden, -torch.inf).softmax(-1) @ v[:, h // shared]
                for h in range(q.shape[1])
            ]
            outputs.append(torch.stack(heads, 1))
        return torch.cat(outputs)


@pytest.fixture
def kernel(monkeypatch):
    plain = PlainKernel()
    monkeypatch.setattr(variable_length, "kernel_for", lambda query: plain)
    return plain


@pytest.mark.parametrize("name", ["qwen2", "qwen2 with windows", "mistral", "qwen3"])
def test_a_packed_row_equals_whole_sequences(kernel, name):
    model = model_of(name)
    check_equal(model, GROUPS, 1e-10, ROUNDING)
    assert kernel.num_calls == model.config.num_hidden_layers, "one call for all sequences of a row"


def random_inputs(num_tokens):
    generator = torch.Generator().manual_seed(0)
    shapes = ((1, 4, num_tokens, 8), (1, 2, num_tokens, 8), (1, 2, num_tokens, 8))
    return [torch.randn(shape, dtype=torch.float64, generator=generator) for shape in shapes]


@pytest.mark.parametrize("window", [None, 3])
def test_branched_rows_and_parts_of_a_row_equal_blocks(kernel, monkeypatch, window):
    settings, inputs = {"scale": 0.3, "window": window, "softcap": None}, random_inputs(len(TREES.token_ids))
    parts = [TREES.attention, TREES.attention.cut(0, 2), TREES.attention.cut(1, 2), TREES.attention.cut(2, 3)]
    by_kernel = [part(*inputs, **settings) for part in parts]
    monkeypatch.setattr(variable_length, "kernel_for", lambda query: None)
    for part, answers in zip(parts, by_kernel, strict=True):
        torch.testing.assert_close(answers, part(*inputs, **settings), rtol=0, atol=1e-12)
    torch.testing.assert_close(by_kernel[1] + by_kernel[2], by_kernel[0], rtol=0, atol=1e-12)


def test_capped_scores_have_no_kernel(kernel):
    check_equal(model_of("gemma2"), GROUPS, ROUNDING, ROUNDING)
    assert kernel.num_calls == 0


def test_no_queries_are_no_call(kernel):
    nothing = PackedAttention([], torch.zeros(3, dtype=torch.int64))
    assert not nothing(*random_inputs(3), scale=1.0, window=None, softcap=None).any()
    assert kernel.num_calls == 0


def test_only_a_gpu_has_a_kernel():
    assert kernel_for(torch.zeros(3, 2, 8, dtype=torch.bfloat16)) is None


def test_torchs_own_function_takes_these_arguments():
    """Its kernel exists on GPUs alone: called on a CPU it fails there, and not in the arguments."""
    kernel = variable_length._torch_kernel()
    if kernel is None:
        pytest.skip("this torch has none with a scale and windows")
    query, key = torch.zeros(3, 4, 8, dtype=torch.bfloat16), torch.zeros(3, 2, 8, dtype=torch.bfloat16)
    ends = torch.tensor([0, 3], dtype=torch.int32)
    with pytest.raises((NotImplementedError, RuntimeError), match=r"CPU|flash|CUDA"):
        kernel(query, key, key, ends, ends, 3, 3, scale=0.3, window_size=(-1, 0))
