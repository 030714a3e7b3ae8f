"""Ranks that compute packed rows together give the numbers of one rank that computes them alone."""

from pathlib import Path

import pytest
import torch
from test_workers_packed import GROUPS, ROUNDING, SHAPE
from transformers import AutoConfig

from rlinf_workers.launchers.local.launcher import LocalLauncher
from rlinf_workers.models.language_model import ModelSettings, build_model
from rlinf_workers.models.packed import pack_without_padding
from rlinf_workers.models.picture_processor import reads_pictures
from rlinf_workers.models.sequences import pack_groups
from rlinf_workers.models.trainable import Likeliest, LogitNorms, TokenModel, ValueModel
from rlinf_workers.roles.records.language import ExampleBatch, SampleGroup
from rlinf_workers.testing.backends import Chooser, trial_worker
from rlinf_workers.testing.launchers import launched, start
from rlinf_workers.testing.pictures import prompt_with_pictures, tiny_vision_language
from rlinf_workers.trainers.base import OptimizerSettings
from rlinf_workers.trainers.fsdp2.backend import fsdp2
from rlinf_workers.trainers.replicated.backend import ReplicatedBackend
from rlinf_workers.worker import Worker

pytestmark = pytest.mark.usefixtures("forked_workers")

BOUND = 1e-9
"""Of float64."""
SETTINGS = OptimizerSettings(learning_rate=1e-2, epsilon=1.0, max_grad_norm=1e9)
BACKENDS = {"replicated": ReplicatedBackend, "fsdp2": fsdp2}
MODELS = {
    "queries that share keys": ("qwen2", {}),
    "fewer keys than ranks": ("qwen2", {"num_key_value_heads": 1}),
    "fewer heads than ranks": ("qwen2", {"num_attention_heads": 1, "num_key_value_heads": 1}),
    "windows": ("qwen2", {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}),
    "capped scores": ("gemma2", {"head_dim": 16, "sliding_window": 6, "attn_logit_softcapping": 2.0}),
}
EXPERTS = {
    "head_dim": 16,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}
EXAMPLES = ExampleBatch(shard=0, token_ids=torch.arange(3, 24).view(3, 7) % 13, loss_mask=torch.ones(3, 7))


class Sharing(Worker):
    """A rank of a trainer."""

    def train(self, backend, folder, of_values=False):
        """Outputs before, norms and statistics of three updates of two shards, the tensors that this rank writes."""
        has_experts = AutoConfig.from_pretrained(folder).model_type == "qwen3_moe"
        dtype = "float32" if has_experts else "float64"  # the grouped product knows no float64
        model = ModelSettings(folder=folder, has_weights=False, dtype=dtype)
        kind = ValueModel(model) if of_values else TokenModel(model, 0.7, balances_routers=has_experts)
        size = self.identity.num_ranks_per_replica
        trained = BACKENDS[backend](kind, self, optimizer=SETTINGS, num_shards=2, sequence_parallel=size)
        groups = GROUPS if not reads_pictures(folder) else groups_with_pictures(model)
        before = trained.forward(pack_without_padding(groups), entropies=True)
        outputs = [before.logprobs, before.entropies, before.values]
        if not of_values:
            outputs.append(trained.forward(LogitNorms(pack_without_padding(groups))).logit_norms)
            outputs.append(trained.forward(Likeliest(pack_without_padding(groups))).is_likeliest)
        totals = []
        for number in range(3):
            trained.begin(2)
            for shard in trained.shards:
                for group in groups[shard::2]:
                    trained.backward(shard, pack_without_padding([group]), loss_of, entropies=True)
                if number == 0 and shard == 0 and not of_values:
                    trained.backward(shard, EXAMPLES, lambda answers: (answers.logprobs.sum(), [1.0, 0.0]))
            totals += [trained.finish_backward(), trained.step(3.0)]
        return outputs, totals, trained.model_tensors()

    def refused(self, folder):
        """What is refused: padded completions, and models without sequences."""
        texts = []
        kind = TokenModel(ModelSettings(folder=folder, has_weights=False), 1.0)
        backend = ReplicatedBackend(kind, self, optimizer=SETTINGS, num_shards=1, sequence_parallel=2)
        for attempt in (
            lambda: backend.forward(pack_groups(GROUPS)),
            lambda: fsdp2(Chooser(), self, optimizer=SETTINGS, num_shards=1, sequence_parallel=2),
            lambda: fsdp2(kind, self, optimizer=SETTINGS, num_shards=1, sequence_parallel=4),
        ):
            with pytest.raises(ValueError) as caught:
                attempt()
            texts.append(str(caught.value))
        return texts


def groups_with_pictures(settings: ModelSettings) -> list[SampleGroup]:
    """Pictures of several sizes and a video; the second half of each row begins in one of them, or has none."""
    model = build_model(settings, torch.device("cpu"))
    groups = []
    for index, sizes in enumerate([[(3, 4)], [(1, 2), (2, 5)], [], [(1, 1), (1, 3), (2, 2, 2)]]):
        mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 1.0]])
        prompt = prompt_with_pictures(model, index, sizes)
        ids = torch.arange(2, 8).view(2, 3) * mask.long()
        zeros = torch.zeros_like(mask)
        groups.append(
            SampleGroup(prompt=prompt, completion_ids=ids, loss_mask=mask, rollout_logprobs=zeros, policy_version=0)
        )
    return groups


def loss_of(answers):
    """All outputs, each token with another weight."""
    total = torch.zeros(())
    for name in ("logprobs", "entropies", "values"):
        output = getattr(answers, name)
        total = total + (output * torch.arange(output.numel()).view_as(output).cos()).sum()
    return total + 3.0 * answers.router_loss.sum(), [1.0, float(total.detach())]


def folder_of(tmp_path: Path, kind: str, changes) -> str:
    AutoConfig.for_model(kind, **{**SHAPE, **changes}).save_pretrained(tmp_path)
    return str(tmp_path)


def check_equal(ranks, backend, folder, *, bound=BOUND, **options):
    outputs, totals, expected = trial_worker_of().train("replicated", folder, **options)
    results = ranks.call("train", backend, folder, *options.values())
    for own_outputs, own_totals, _ in results:
        for own, alone in zip(own_outputs, outputs, strict=True):
            torch.testing.assert_close(own, alone, rtol=0, atol=bound)
        torch.testing.assert_close(flat(own_totals), flat(totals), rtol=bound, atol=bound)
    written = {name: tensor for *_, tensors in results for name, tensor in tensors.items()}
    assert written.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(written[name], tensor, rtol=0, atol=bound, msg=lambda text, n=name: f"{n}: {text}")


def trial_worker_of():
    alone = Sharing()
    alone._host = trial_worker()._host
    alone.identity = alone._host.identity
    return alone


def flat(totals):
    return torch.tensor([number for one in totals for number in (one if isinstance(one, list) else [one])])


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, fork_server):
    with launched(LocalLauncher) as launcher:
        yield start(launcher, tmp_path_factory.mktemp("two"), Sharing, num_ranks=2, num_ranks_per_replica=2)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_equal_one(tmp_path, two_ranks, backend, name):
    check_equal(two_ranks, backend, folder_of(tmp_path, *MODELS[name]))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["qwen2_5_vl", pytest.param("qwen3_vl", marks=pytest.mark.slow)])
def test_each_rank_computes_the_pictures_of_its_tokens(tmp_path, two_ranks, backend, name):
    check_equal(two_ranks, backend, tiny_vision_language(name, tmp_path).folder)


def test_the_loss_of_routers_counts_the_tokens_of_all_ranks(tmp_path, two_ranks):
    check_equal(two_ranks, "fsdp2", folder_of(tmp_path, "qwen3_moe", EXPERTS), bound=ROUNDING)


def test_a_critic_is_shared_too(tmp_path, two_ranks):
    check_equal(two_ranks, "fsdp2", folder_of(tmp_path, "qwen2", {}), of_values=True)


def test_what_cannot_be_shared_is_refused(tmp_path, two_ranks):
    padded, choosing, larger = two_ranks.call("refused", folder_of(tmp_path, "qwen2", {}))[0]
    assert padded == "ranks share packed rows alone; set actor.max_tokens_per_micro_batch"
    assert choosing.endswith("Chooser has no sequences that ranks can share")
    assert larger.endswith("sequence_parallel=4: it is the number of ranks of a replica, and here they have 2")


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 4])
def test_four_ranks_equal_one(tmp_path, size):
    with launched(LocalLauncher) as launcher:
        ranks = start(launcher, tmp_path, Sharing, num_ranks=4, num_ranks_per_replica=size)
        changes = {"num_attention_heads": 2, "num_key_value_heads": 2} if size == 4 else {}
        check_equal(ranks, "fsdp2", folder_of(tmp_path, "qwen2", changes))
