"""Statistics of an update: sums in the order of the micro-batches, whatever device they are on."""

import torch

from rlinf_comm.testing import assert_bitwise_equal
from rlinf_workers.trainers.statistics import StatisticSums, totals_of


def test_numbers_and_tensors_add_up_alike():
    sums = StatisticSums([0, 2], 2)
    for shard, values in ((0, (0.1, 1.0)), (2, (5.0, 6.0)), (0, (0.2, 2.0)), (0, (0.3, 3.0))):
        sums.add(shard, values if shard else totals_of((values[0], torch.tensor(values[1])), torch.zeros(1)))
    first, second = sums.of_shards()
    assert_bitwise_equal(first, torch.tensor([0.1 + 0.2 + 0.3, 6.0], dtype=torch.float64))
    assert second.tolist() == [5.0, 6.0]


def test_no_micro_batch_is_zero():
    assert StatisticSums([1], 3).of_shards()[0].tolist() == [0.0, 0.0, 0.0]


def test_totals_have_no_gradient():
    loss = torch.ones((), requires_grad=True) * 2
    totals = totals_of((1.5, loss), loss)
    assert totals.tolist() == [1.5, 2.0] and totals.dtype == torch.float64 and not totals.requires_grad
