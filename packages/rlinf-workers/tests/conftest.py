"""A language model small enough for a test, and workers without a process."""

import pathlib
import sys
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch

from rlinf_workers.execution.worker_host import WorkerHost
from rlinf_workers.launchers.base import Identity
from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.testing.engines import tiny_model
from rlinf_workers.worker import Phase, StepContext

sys.path.append(str(pathlib.Path(__file__).parent))  # for workers_megatron_ranks.py, here and in processes


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> ModelSettings:
    """A Qwen2 of two layers with a tokenizer of single characters, weights from a seed."""
    torch.set_num_threads(1)
    return replace(tiny_model(tmp_path_factory.mktemp("model")), has_weights=False)


@pytest.fixture
def make_worker():
    """Makes a worker in this process: `make_worker(Actor, settings)`."""

    def make(worker_class, *arguments, step=0, phase: Phase = "train", num_items=0):
        identity = Identity(role="worker", rank=0, num_ranks=1, devices=("cpu:0",), rendezvous="")
        host = WorkerHost(identity, lambda *_, **__: Future())
        host.step = StepContext(step=step, phase=phase, seed=0, num_items=num_items)
        return host.make(worker_class, *arguments)

    return make


class ListReader(list):
    """A reader over chunks that are there already, as far as one iterates over it."""

    granularity = 1

    def ready_chunk(self):
        return []

    def hands_on(self, began_ns):
        return nullcontext()


class ListWriter:
    """A writer that keeps what was put."""

    def __init__(self):
        self.items = []

    def put(self, item, *, key=0):
        self.items.append(item)

    def put_many(self, items):
        self.items.extend(item for _, item in items)


@pytest.fixture
def reader():
    return ListReader


@pytest.fixture
def writer():
    return ListWriter()
