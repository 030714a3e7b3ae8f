"""A language model small enough for a test, and workers without a process."""

from concurrent.futures import Future

import pytest
import torch

from rlinf_workers.execution.worker_host import WorkerHost
from rlinf_workers.launcher.base import Identity
from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.worker import Phase, StepContext


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> ModelSettings:
    """A Qwen2 of two layers with a tokenizer of single characters, weights from a seed."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen2Config

    folder = tmp_path_factory.mktemp("model")
    vocabulary = {token: i for i, token in enumerate(["<pad>", "<end>", *"0123456789="])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<end>").save_pretrained(folder)
    Qwen2Config(
        vocab_size=len(vocabulary),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    ).save_pretrained(folder)
    torch.set_num_threads(1)
    return ModelSettings(folder=str(folder), has_weights=False, seed=3)


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
    """A reader over chunks that are there already."""


class ListWriter:
    """A writer that keeps what was put."""

    def __init__(self):
        self.items = []

    def put(self, item, *, key=0, policy_version=-1):
        self.items.append(item)

    def put_many(self, items, *, policy_version=-1):
        self.items.extend(item for _, item in items)


@pytest.fixture
def reader():
    return ListReader


@pytest.fixture
def writer():
    return ListWriter()
