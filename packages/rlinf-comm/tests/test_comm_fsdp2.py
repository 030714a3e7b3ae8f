"""fsdp2(): the layout of real fully_shard models on several gloo processes, against DTensor.full_tensor()."""

import pathlib
import subprocess
import sys

import pytest
import torch

from rlinf_comm import LayoutError, unpack
from rlinf_comm.testing import LAYOUT_CHECKS, assert_bitwise_equal, execute_copies
from rlinf_comm.weights import Layout, reshard_plan, specs_of
from rlinf_comm.weights.layouts import fsdp2_layout, huggingface_layout
from rlinf_comm.weights.layouts.shape import TransformerShape

SCRIPT = pathlib.Path(__file__).with_name("comm_fsdp_ranks.py")


@pytest.fixture(scope="module")
def start_ranks():
    """start_ranks(case, world, folder) -> [(layout, shards, full tensors)] of each rank"""
    process = subprocess.Popen([sys.executable, str(SCRIPT)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    inbox, outbox = process.stdin, process.stdout

    def start(case, world, folder):
        store = folder / "rank"
        inbox.write(f"{case}\t{world}\t{store}\n")
        inbox.flush()
        answer = outbox.readline()
        assert answer == "done\n", f"{answer}; what they raised is in the captured output"
        return [unpack(pathlib.Path(f"{store}.{rank}").read_bytes()) for rank in range(world)]

    yield start
    process.kill()
    process.communicate()


def ordered(tensors):
    return [tensors[name] for name in sorted(tensors)]


@pytest.mark.parametrize(
    ("case", "world"), [("uneven", 2), ("columns", 2), ("cast", 2), ("moe", 2), ("hybrid", 4), ("tensor parallel", 4)]
)
def test_shards_of_a_real_model_make_its_full_tensors(case, world, tmp_path, start_ranks):
    if case == "moe":
        pytest.importorskip("transformers")
    ranks = start_ranks(case, world, tmp_path)
    layout, full = ranks[0][0], ranks[0][2]
    sources = []
    for rank, (own_layout, shards, _) in enumerate(ranks):
        assert own_layout == layout, "the ranks derive different layouts"
        buffers = {name: (buffer.shape, buffer.dtype) for name, buffer in layout.ranks[rank].buffers.items()}
        assert {name: (spec.shape, spec.dtype) for name, spec in specs_of(shards).items()} == buffers
        sources += ordered(shards)
    whole = Layout.replicated(layout.specs, 1)
    if case == "moe":
        shape = TransformerShape(
            num_layers=2, hidden=6, num_heads=2, num_kv_heads=1, head_dim=3, vocab=11, intermediate=10, num_experts=3,
            expert_intermediate=4, dense_layers=(1,), qk_norm=True, tied_embeddings=True,
        )  # fmt: skip
        whole = huggingface_layout(shape, fused_experts=any(name.endswith("gate_up_proj") for name in full))
    want = {
        name: tensor.to(torch.bfloat16 if case in ("cast", "moe") else tensor.dtype) for name, tensor in full.items()
    }
    got = {name: torch.full_like(tensor, -1) for name, tensor in want.items()}
    execute_copies(reshard_plan(layout, whole).copies(dst_rank=0), sources, ordered(got))
    assert_bitwise_equal(got, want)
    for check in LAYOUT_CHECKS:
        check(layout)


def test_plain_models_are_refused():
    with pytest.raises(LayoutError, match="no parameter is a DTensor; call fully_shard"):
        fsdp2_layout(dict(torch.nn.Linear(2, 2).named_parameters()))
