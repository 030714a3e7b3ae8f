"""The replicated backend: it conforms, on one rank and on two, and its gradients move with what they hold."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from rlinf_comm.weights import Layout, specs_of
from rlinf_workers.collectives import RankGroup, RankGroups
from rlinf_workers.testing.backends import NUM_SHARDS, ORDINARY, Chooser, alone, check_backend, check_ranks, update
from rlinf_workers.training.base import BackendSettings, OptimizerSettings, Step
from rlinf_workers.training.replicated.backend import ReplicatedBackend
from rlinf_workers.training.replicated.gradients import ShardedGradients


def test_it_conforms(tmp_path):
    check_backend(ReplicatedBackend, str(tmp_path))


class AnswersWithGradient(ReplicatedBackend):
    def forward(self, batch, *, entropies=False):
        return self._kind.answers(self._model, batch, entropies=entropies)


class NamesOtherWeights(ReplicatedBackend):
    def weights(self):
        return {name: weight for name, weight in super().weights().items() if name != "count"}

    def layout(self):
        return Layout.replicated(specs_of(super().weights()), 1)


class MeansOverMicroBatches(ReplicatedBackend):
    def backward(self, shard, batch, loss_of, *, entropies=False):
        def mean(answers):
            loss, statistics = loss_of(answers)
            return loss / len(batch), statistics

        super().backward(shard, batch, mean, entropies=entropies)


class ForgetsCounts(ReplicatedBackend):
    def count(self, shard, statistics):
        pass


class DoesNotClip(ReplicatedBackend):
    def restart(self, optimizer):
        super().restart(replace(optimizer, max_grad_norm=1e9))


class StepsAnyway(ReplicatedBackend):
    def step(self, divisor):
        try:
            return super().step(divisor)
        except FloatingPointError:
            return Step(1.0, 1.0)


class CountsARefusedStep(ReplicatedBackend):
    def step(self, divisor):
        try:
            return super().step(divisor)
        except FloatingPointError:
            self.num_steps += 1
            raise


class LosesGradientsWhenMoved(ReplicatedBackend):
    def offload(self):
        super().offload()
        self._gradients.zero(2)


class KeepsTheOptimizersState(ReplicatedBackend):
    def restart(self, optimizer):
        if hasattr(self, "_optimizer"):
            self.num_steps = 0
        else:
            super().restart(optimizer)


class TakesNoWeightsOver(ReplicatedBackend):
    def start_from(self, other):
        pass


class SavesNoMoments(ReplicatedBackend):
    def load_optimizer(self, folder):
        self.num_steps = 2


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        (AnswersWithGradient, r"forward\(\) answers logprobs with a gradient"),
        (NamesOtherWeights, r"weights\(\) has .*, layout\(\) says"),
        (MeansOverMicroBatches, r"norm .*, not"),
        (ForgetsCounts, "statistics"),
        (DoesNotClip, "step 0 of 2 shards"),
        (StepsAnyway, "took an infinite gradient"),
        (CountsARefusedStep, "differ"),
        (LosesGradientsWhenMoved, "statistics|differ"),
        (KeepsTheOptimizersState, "differ"),
        (TakesNoWeightsOver, "differ"),
        (SavesNoMoments, "differ"),
    ],
)
def test_the_suite_finds(broken, says, tmp_path):
    with pytest.raises(AssertionError, match=says):
        check_backend(broken, str(tmp_path))


def trained(place):
    backend = ReplicatedBackend(Chooser(), place, optimizer=ORDINARY, num_shards=NUM_SHARDS)
    for _ in range(3):
        update(backend)
    return {name: weight.detach().clone() for name, weight in backend.weights().items()}


def test_two_ranks_conform_and_have_the_numbers_of_one(tmp_path):
    check_ranks(TwoRanks, str(tmp_path), num_ranks=2, num_ranks_per_replica=1)
    expected = {name: weight.numpy().tobytes() for name, weight in trained(alone()).items()}
    for rank in range(2):
        assert {name: weight.numpy().tobytes() for name, weight in load_file(tmp_path / f"{rank}").items()} == expected


class TwoRanks(ReplicatedBackend):
    """Writes down, when its files are checked, what three updates make of a backend on this place."""

    def save_optimizer(self, folder):
        super().save_optimizer(folder)
        save_file(trained(self._place), f"{folder}/{self._place.rank}")


def test_a_number_of_shards_that_ranks_do_not_divide_is_refused():
    place, two = alone(), RankGroup(0, 2)
    place._host.rank_groups = RankGroups(all=two, replica=RankGroup(0, 1), replicas=two)
    with pytest.raises(ValueError, match=r"actor\.num_shards=3 is not a multiple of its 2 ranks; use 2 or a multiple"):
        ReplicatedBackend(Chooser(), place, optimizer=ORDINARY, num_shards=3)


def test_settings_make_a_backend_by_name_or_import_path():
    for name in ("replicated", "rlinf_workers.training.replicated.backend:ReplicatedBackend"):
        made = BackendSettings(name=name, num_shards=2).make(Chooser(), alone(), ORDINARY)
        assert isinstance(made, ReplicatedBackend)
        assert list(made.shards) == [0, 1]


def test_gradients_move_with_what_they_hold():
    """The sums stay, the views follow, and what was reduced is still each parameter's gradient."""
    model = torch.nn.Linear(3, 2)
    gradients = ShardedGradients(model.parameters(), 1, RankGroup(0, 1))
    gradients.zero(1)
    for _ in range(2):
        gradients.backward(0, model(torch.ones(1, 3)).sum())
        gradients.move(torch.device("cpu"), lambda: None)
    gradients.reduce()
    gradients.move(torch.device("cpu"), lambda: None)
    assert model.weight.grad is not None
    assert torch.equal(model.weight.grad, torch.full((2, 3), 2.0))
    gradients = ShardedGradients(model.parameters(), 1, RankGroup(0, 1))
    gradients.move(torch.device("meta"), lambda: None)
    assert {view.device.type for views in gradients._views.values() for view in views} == {"meta"}


def test_learning_rate_schedule():
    settings = OptimizerSettings(learning_rate=1.0, warmup_steps=4, decay_steps=10, min_lr_ratio=0.25)
    assert [settings.learning_rate_at(step) for step in (0, 3, 5, 9, 100)] == pytest.approx(
        [0.25, 0.7, 0.5, 0.25, 0.25]
    )
