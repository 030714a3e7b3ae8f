"""Weights are checked while a stage computes with them, and nothing that was made with wrong ones leaves it."""

import os
import time
from pathlib import Path

import pytest
import torch

from rlinf_sched import Cluster, plan_for_mode
from rlinf_workers import Executor, Flow, Reader, RemoteError, StepContext, Writer
from rlinf_workers.testing.toy_flow import Learn, Number, Scale, Shift, reference_run
from rlinf_workers.weight_sync.shared.sync import SharedWeightSync

NUMBERS = [Number(index=i, value=float(i)) for i in range(4)]
FOLDER, FLIPS = "TEST_CHECKS_FOLDER", "TEST_CHECKS_FLIPS"
PATIENCE_S = 30.0


def mark(name: str) -> None:
    Path(os.environ[FOLDER], name).touch()


class LateReceiver:
    """Checks no sooner than something has been computed, and flips a bit of what is served before."""

    def __init__(self, receiver):
        self._receiver = receiver

    def receive(self, tensors, policy_version, timeout_s=60.0):
        check = self._receiver.receive(tensors, policy_version, timeout_s)
        if FLIPS in os.environ:
            tensors["weight"].view(torch.uint8)[2] ^= 4

        def late() -> None:
            end_s = time.monotonic() + PATIENCE_S
            while not Path(os.environ[FOLDER], "computed").exists():
                assert time.monotonic() < end_s, "nothing was computed while the weights were checked"
                time.sleep(0.01)
            check()

        return late


class LateSync(SharedWeightSync):
    @staticmethod
    def open_receiver(port):
        return LateReceiver(SharedWeightSync.open_receiver(port))


class Marking(Scale):
    def scale(self, numbers: Reader[Number], scaled: Writer[Number]) -> None:
        for chunk in numbers:
            products = [
                (item.index, Number(index=item.index, value=item.value * float(self._weight))) for item in chunk
            ]
            mark("computed")
            scaled.put_many(products)


class Witness(Shift):
    def shift(self, scaled: Reader[Number], shifted: Writer[Number]) -> None:
        for chunk in scaled:
            mark("left")
            shifted.put_many([(item.index, Number(index=item.index, value=item.value + 1.0)) for item in chunk])


def run(tmp_path, mode, environment, notes=None, **options):
    flow = Flow("toy").worker("scale", Marking).worker("shift", Witness).worker("learn", Learn)
    flow.stage("scale", Marking.scale, reads="numbers", writes="scaled")
    flow.stage("shift", Witness.shift, reads="scaled", writes="shifted", needs_device=False)
    flow.stage("learn", Learn.learn, reads="shifted", dispatch="key", trains=True)
    flow.weights("learn", to="scale")
    cluster = Cluster.cpu_slots(2)
    with Executor(
        cluster=cluster,
        log_folder=tmp_path / "logs",
        env_vars={"OMP_NUM_THREADS": "1", FOLDER: str(tmp_path), **environment},
        weight_sync=f"{__name__}:LateSync",
        **options,
    ) as executor:
        executor.start(flow, plan_for_mode(flow.graph(), cluster, mode))
        executor.sync_weights()
        if notes is not None:
            notes += executor.notes
        context = StepContext(step=0, phase="train", seed=0, num_items=len(NUMBERS))
        return executor.run(flow, context=context, feeds={"numbers": NUMBERS}, timeout_s=600)


@pytest.mark.parametrize("mode", ["collocated", pytest.param("disaggregated", marks=pytest.mark.slow)])
def test_a_stage_computes_while_its_weights_are_checked(tmp_path, mode):
    expected = reference_run([number.value for number in NUMBERS], 1)
    assert [run(tmp_path, mode, {}).metrics["learn/weight"]] == expected


def test_nothing_made_with_a_flipped_bit_leaves_and_the_tensor_is_named(tmp_path):
    with pytest.raises(RemoteError, match="receiver 0 must not serve version 0: weight differs") as raised:
        run(tmp_path, "disaggregated", {FLIPS: "1"})
    assert raised.value.error_type == "WeightMismatchError"
    assert (tmp_path / "computed").exists() and not (tmp_path / "left").exists()


@pytest.mark.slow
def test_weights_that_are_not_attested_are_served_as_they_came_and_noted(tmp_path):
    notes = []
    run(tmp_path, "disaggregated", {FLIPS: "1"}, notes, attest_weights=False)
    assert (tmp_path / "left").exists()
    (note,) = notes
    assert note.startswith("weights learn -> scale are not attested")
