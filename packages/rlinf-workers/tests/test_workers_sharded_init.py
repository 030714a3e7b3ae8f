"""Models that are made in shards begin with the numbers that they have whole, in the memory of the shards."""

import dataclasses
import subprocess
import sys

import pytest
import torch
from torch import nn

from rlinf_workers.models.language_model import build_model, outline_model
from rlinf_workers.models.sharded_init import ShardedInit
from rlinf_workers.models.trainable import TokenModel, ValueModel
from rlinf_workers.testing.architectures import ARCHITECTURES, tiny_architecture

NUM_RANKS = 3


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_each_rank_has_its_rows_of_what_the_seed_makes(tmp_path, name):
    settings = tiny_architecture(name, tmp_path)
    for dtype in ("float32", "bfloat16"):
        settings = dataclasses.replace(settings, has_weights=False, dtype=dtype, seed=7)
        for kind in (TokenModel(settings, 1.0), ValueModel(settings)):
            torch.manual_seed(1)
            expected = kind.build(torch.device("cpu"))
            state = torch.get_rng_state()
            for rank in range(NUM_RANKS):
                torch.manual_seed(1)
                with ShardedInit(rank, NUM_RANKS) as shards:
                    outline = kind.outline()
                assert torch.equal(torch.get_rng_state(), state), "the next numbers are others"
                check(outline, expected, shards, rank)


def check(outline, expected, shards, rank):
    wholes, names = dict(expected.named_parameters()), []
    for name, parameter in outline.named_parameters():
        assert parameter.is_meta
        assert parameter.dtype == wholes[name].dtype
        rows = wholes[name].chunk(NUM_RANKS)
        shard = shards.take(parameter)
        assert torch.equal(shard, rows[rank] if rank < len(rows) else rows[0][:0]), name
        names.append(name)
    assert names == list(wholes), "tied parameters are one"
    check_buffers(outline, expected)


def check_buffers(outline, expected):
    buffers = dict(expected.named_buffers())
    assert buffers
    for name, buffer in outline.named_buffers():
        assert torch.equal(buffer, buffers.pop(name)), name
    assert not buffers


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_buffers_of_an_outline_are_those_of_the_folder(tmp_path, name):
    settings = dataclasses.replace(tiny_architecture(name, tmp_path, rope_theta=123.0), dtype="bfloat16")
    with ShardedInit(0, 1) as shards:
        outline = outline_model(settings)
    assert all(shards.take(parameter) is None for parameter in outline.parameters())
    check_buffers(outline, build_model(settings, torch.device("cpu")))


def test_what_is_made_from_what_is_given_up_is_refused():
    with ShardedInit(0, 2):
        first, _ = nn.Linear(3, 4), nn.Linear(3, 4)
        with pytest.raises(
            RuntimeError, match=r"a tensor \[4, 3\] of the model is computed by mul_ from numbers that were"
        ):
            first.weight.detach().mul_(2.0)
    layer = nn.Linear(3, 4)
    assert not layer.weight.is_meta


PEAK = """
import sys, torch, torch.distributed as dist
from concurrent.futures import Future
from dataclasses import replace
from torch.testing._internal.distributed.fake_pg import FakeStore
from rlinf_workers.execution.worker_host import WorkerHost
from rlinf_workers.launchers.base import Identity
from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.models.trainable import TokenModel
from rlinf_workers.trainers.base import OptimizerSettings
from rlinf_workers.trainers.fsdp2.backend import fsdp2
from rlinf_workers.worker import Worker

def now(what):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(what))

def growth(do):
    open("/proc/self/clear_refs", "w").write("5")
    before = now("VmRSS")
    made = do()
    return made, now("VmHWM") - before

dist.init_process_group("fake", rank=1, world_size=4, store=FakeStore())
worker = WorkerHost(Identity(role="actor", rank=1, num_ranks=4), lambda *_, **__: Future()).make(Worker)
settings = OptimizerSettings(learning_rate=1.0)
def make(folder, has_weights):
    kind = TokenModel(ModelSettings(folder=folder, has_weights=has_weights), 1.0)
    return fsdp2(kind, worker, optimizer=settings, num_shards=4)
small, large = sys.argv[1:]
make(small, True).load_model(small)
for has_weights in (True, False):
    backend, peak = growth(lambda: make(large, has_weights))
    print(sum(shard.nbytes for shard in backend.weights().values()), peak)
    print(0, growth(lambda: backend.load_model(large))[1])
    del backend
"""


@pytest.mark.slow
def test_a_rank_never_has_the_memory_of_the_whole_model(tmp_path):
    """From a folder and from a seed, and while a checkpoint is read: one of 4 ranks has its quarter, the largest
    tensor, what is mapped of the files, and little more."""
    tiny_architecture("qwen3", tmp_path / "small")
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 8, "head_dim": 128}
    tiny_architecture("qwen3", tmp_path / "large", **sizes)
    whole = (tmp_path / "large" / "model.safetensors").stat().st_size
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path / "small"), str(tmp_path / "large")],
        capture_output=True,
        text=True,
        check=False,
    )
    assert not done.returncode, done.stderr
    for line in done.stdout.splitlines():
        shard, peak = (int(number) for number in line.split())
        assert shard in (0, pytest.approx(whole / 4, rel=0.01))
        assert peak < shard + (24 << 20), f"{peak} bytes for a shard of {shard}; the whole model has {whole}"
    assert len(done.stdout.splitlines()) == 4
