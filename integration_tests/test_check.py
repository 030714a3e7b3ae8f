"""`rlinf check`, and the verdict on a run's first step: honest engines pass, others are found out."""

import json

import pytest

from command_line import SHORT_SORT, flags, rlinf

LIARS = "integration_tests.extensions.liars"
SMALL = {
    **{key: value for key, value in SHORT_SORT.items() if not key.startswith("sft_warm_up")},
    "sft_warm_up": "null",
    "mode": "collocated",
    "cluster.num_devices": 1,
    "cluster.device": "cpu",
}


def run(*arguments, **overrides):
    return rlinf(*arguments, *flags(SMALL | overrides))


@pytest.mark.slow
def test_an_honest_engine_passes():
    done = run("check", "sort-grpo")
    assert done.returncode == 0
    assert "engine and trainer agree as far as rounding lets them.\n" in done.stdout
    assert len(done.stdout.splitlines()) <= 24, "one screen"
    versions = [line.split()[-2:] for line in done.stdout.splitlines() if line.startswith("policy version")]
    assert versions == [["0", "1"], ["0", "1"]]


def verdicts_of(done):
    return next(line.split()[1:] for line in done.stdout.splitlines() if line.startswith("verdict"))


@pytest.mark.slow
def test_what_fp8_rounds_is_no_fault_and_a_wrong_scale_is_one():
    """The trainer scores with the same quantized weights, so that float32's bound holds."""
    quantized = {"rollout.quantization": "fp8"}
    done = run("check", "sort-grpo", **quantized)
    assert (done.returncode, verdicts_of(done)) == (0, ["agree", "agree"]), done.stdout
    rows = {line.rpartition("  ")[0].partition("  ")[0]: line.split()[-2:] for line in done.stdout.splitlines()}
    measured, explained = rows["unquantized trainer: KL"], rows["KL that rounding explains"]
    assert all(float(kl) > 100 * float(bound) for kl, bound in zip(measured, explained, strict=True))
    done = run("check", "sort-grpo", **quantized, **{"rollout.engine": f"{LIARS}:OtherScales"})
    assert (done.returncode, verdicts_of(done)) == (1, ["DISAGREE", "DISAGREE"]), done.stdout


def test_an_engine_that_keeps_its_first_weights_is_found_by_the_second_round():
    done = run("check", "sort-grpo", **{"rollout.engine": f"{LIARS}:FirstVersion"})
    assert done.returncode == 1
    assert verdicts_of(done) == ["agree", "DISAGREE"]
    assert "MISMATCH, after a step" in done.stdout
    assert "1. version: " in done.stdout


@pytest.mark.slow
def test_a_run_stops_after_its_first_step_if_it_is_to(tmp_path):
    lie = {"rollout.engine": f"{LIARS}:OtherTemperature", "rollout.stop_on_mismatch": "true"}
    lie |= {"reward.kind": "random", "run.num_steps": 2}  # so that there is a gradient without an SFT warm-up
    done = run("train", "sort-grpo", "--output", str(tmp_path / "run"), **lie)
    assert done.returncode == 1
    assert "do NOT agree about the sampled tokens" in done.stderr
    assert "2. temperature: " in done.stderr
    verdict = json.loads((tmp_path / "run" / "manifest.json").read_text())["sessions"][-1]["agreement"]
    assert (verdict["agrees"], verdict["step"]) == (False, 0)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 1
