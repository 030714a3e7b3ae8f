"""The parts of an evaluation: which model folder, what is kept after a kill, and the scores of samples."""

import json
from pathlib import Path
from typing import Any

import pytest

from rlinf.console.eval_progress import EvalProgress
from rlinf.errors import UserError
from rlinf.evaluation.benchmarks import Benchmark
from rlinf.evaluation.folder import EvalFolder
from rlinf.evaluation.model import model_folder
from rlinf.evaluation.run import benchmark_seed
from rlinf.evaluation.scores import score_benchmark, score_table, show
from rlinf.run_folder.checkpoints import checkpoint_name, point_to_best, writing_with_checksums
from rlinf.run_folder.fingerprints import BLOCK_BYTES, NUM_BLOCKS, model_fingerprint
from rlinf.tasks import TaskProblem
from rlinf_algos import Estimate
from rlinf_algos.rewards import RewardSpec

# -- the model -----------------------------------------------------------------------------------------------------


def write_checkpoint(run: Path, step: int, score: float) -> Path:
    with writing_with_checksums(run / "checkpoints" / checkpoint_name(step), {"own_score": score}) as folder:
        (folder / "model").mkdir()
        (folder / "model" / "config.json").write_text("{}")
        (folder / "optimizer").write_bytes(b"moments")
    point_to_best(run / "checkpoints")
    return run / "checkpoints" / f"step-{step:06d}"


def test_a_run_means_its_newest_checkpoint(tmp_path: Path):
    run = tmp_path / "run"
    first, second = write_checkpoint(run, 5, 0.75), write_checkpoint(run, 10, 0.5)
    assert model_folder(run) == second / "model"
    assert model_folder(first) == first / "model"
    assert model_folder(first / "model") == first / "model"
    assert model_folder(run / "checkpoints" / "best").samefile(first / "model")
    assert model_folder(tmp_path / "absent") == tmp_path / "absent", "is for others to refuse"
    (tmp_path / "new" / "checkpoints").mkdir(parents=True)
    with pytest.raises(UserError, match="the run has no checkpoint yet"):
        model_folder(tmp_path / "new")


def test_a_damaged_checkpoint_is_refused_and_another_named(tmp_path: Path):
    run = tmp_path / "run"
    write_checkpoint(run, 5, 0.75)
    bad = write_checkpoint(run, 10, 0.5)
    (bad / "optimizer").write_bytes(b"damaged, but not read by an evaluation")
    assert model_folder(bad) == bad / "model"
    (bad / "model" / "config.json").write_text("[]")
    for path in (run, bad, bad / "model"):
        with pytest.raises(UserError, match=r"(?s)checkpoint step-000010 is damaged: model/config.json.*step-0*5"):
            model_folder(path)


def test_the_fingerprint_sees_config_tokenizer_and_weights(tmp_path: Path):
    content = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": bytes(300_000), "README.md": b"x"}
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    before = model_fingerprint(tmp_path)
    (tmp_path / "README.md").write_bytes(b"y")
    assert model_fingerprint(tmp_path) == before
    for name, data in content.items():
        changed = data[:-1] + b"!"
        (tmp_path / name).write_bytes(changed)
        assert (model_fingerprint(tmp_path) == before) == (name == "README.md")
        (tmp_path / name).write_bytes(data)
    (tmp_path / "model.safetensors").write_bytes(bytes(300_001))
    assert model_fingerprint(tmp_path) != before


@pytest.mark.parametrize("place", [0, 1, 700, 1022, 1023])
def test_the_fingerprint_of_a_large_file_sees_a_change_of_a_few_megabytes(tmp_path: Path, place: int):
    """Of 64 MiB all zeros but for 1 MiB somewhere; a tensor that training changed is larger."""
    data = bytearray(1024 * BLOCK_BYTES)
    (tmp_path / "model.safetensors").write_bytes(data)
    before = model_fingerprint(tmp_path)
    start = min(place, 1008) * BLOCK_BYTES
    data[start : start + 1024 // NUM_BLOCKS * BLOCK_BYTES] = b"!" * (1024 // NUM_BLOCKS * BLOCK_BYTES)
    (tmp_path / "model.safetensors").write_bytes(data)
    assert model_fingerprint(tmp_path) != before


def test_each_benchmark_has_a_seed_of_its_own():
    seeds = {benchmark_seed(seed, name) for seed in (0, 1, 2**23 - 1) for name in ("gsm8k", "aime24", "aime25")}
    assert len(seeds) == 9
    assert max(seeds) < 2**63


# -- the folder ----------------------------------------------------------------------------------------------------


def row(problem: int, sample: int, **more: Any) -> dict[str, Any]:
    return {"benchmark": "own", "problem": problem, "sample": sample, **more}


def make_folder(path: Path) -> EvalFolder:
    settings: dict[str, Any] = {"config_yaml": "seed: 1\n", "command": ["rlinf"], "inputs": {"the model": "a"}}
    return EvalFolder(path, resume=False, notes=["n"], **settings)


def test_a_torn_problem_is_asked_again(tmp_path: Path):
    with make_folder(tmp_path / "eval") as folder:
        folder.write_samples([row(1, 0), row(1, 1)])
        folder.write_samples([row(2, 0)])
    with (tmp_path / "eval" / "samples.jsonl").open("a") as file:
        file.write(json.dumps(row(3, 0)) + "\n" + json.dumps(row(3, 1))[:-3])
    settings: dict[str, Any] = {"config_yaml": "seed: 1\n", "command": ["again"], "inputs": {"the model": "a"}}
    with EvalFolder(tmp_path / "eval", resume=True, **settings) as folder:
        assert folder.keep_whole_problems(2) == {("own", 1)}
        folder.write_samples([row(2, 0), row(2, 1)])
        assert folder.read_samples() == [row(1, 0), row(1, 1), row(2, 0), row(2, 1)]
    manifest = json.loads((tmp_path / "eval" / "manifest.json").read_text())
    assert [session["command"] for session in manifest["sessions"]] == [["rlinf"], ["again"]]
    assert manifest["notes"] == ["n"]


def test_a_folder_of_other_inputs_or_of_a_run_is_refused(tmp_path: Path):
    with make_folder(tmp_path / "eval"):
        pass
    arguments: dict[str, Any] = {"resume": True, "config_yaml": "", "command": [], "inputs": {"the model": "b"}}
    with pytest.raises(UserError, match=r"the model has changed since the evaluation in .* began"):
        EvalFolder(tmp_path / "eval", **arguments)
    with pytest.raises(UserError, match="there is no evaluation to resume in"):
        EvalFolder(tmp_path, **arguments)
    (tmp_path / "manifest.json").write_text("{}")
    with pytest.raises(UserError, match="is the folder of a training run"):
        EvalFolder(tmp_path, **arguments)


# -- scores --------------------------------------------------------------------------------------------------------


def benchmark(num_problems: int) -> Benchmark:
    problems = [TaskProblem(prompt="p", answer="1", number=number) for number in range(1, num_problems + 1)]
    return Benchmark(
        name="own",
        title="Own",
        file="own.jsonl",
        reward=RewardSpec(rule="exact_match"),
        problems=problems,
        num_bad_rows=0,
        num_long_prompts=0,
        notes=(),
    )


def sampled(problem: int, answers: list[str | None], *, truncated: int = 0) -> list[dict[str, Any]]:
    outcomes = {"1": "right", None: "unparseable", "slow": "timeout"}
    return [
        row(
            problem,
            i,
            answer=answer,
            outcome=outcomes.get(answer, "wrong"),
            truncated=i < truncated,
            num_completion_tokens=10 * problem,
        )
        for i, answer in enumerate(answers)
    ]


def test_scores_of_samples():
    rows = [*sampled(2, ["2", "2.0", "1", None], truncated=3), *sampled(1, ["1", "1", "3", "slow"])]
    scores = score_benchmark(benchmark(2), rows, k=[1, 2, 4], num_samples=4)
    values = {name: estimate.value for name, estimate in scores.estimates.items()}
    assert values["avg@4"] == pytest.approx((0.25 + 0.5) / 2)
    assert values["pass@4"] == 1.0
    assert values["pass@2"] == pytest.approx((0.5 + 5 / 6) / 2)
    assert values["maj@4"] == pytest.approx((0.0 + 1.0) / 2)
    assert values["maj@1"] == values["pass@1"] == values["avg@4"]
    assert scores.outcomes == {"wrong": 3, "right": 3, "unparseable": 1, "timeout": 1}
    assert (scores.num_truncated, scores.mean_completion_tokens) == (3, 15.0)
    header, line = score_table([scores])
    assert dict(zip(header, line, strict=True)) == {
        "benchmark": "Own",
        "problems": "2",
        "avg@4": "37.5 ± 12.5 %",
        "pass@2": "66.7 ± 16.7 %",
        "pass@4": "100.0 (34.2 to 100.0) %",
        "maj@2": show(scores.estimates["maj@2"]),
        "maj@4": "50.0 ± 50.0 %",
        "truncated": "37.5%",
        "no answer": "12.5%",
        "unchecked": "1",
        "tokens": "15",
    }
    assert scores.to_json()["scores"]["avg@4"]["standard_error"] == pytest.approx(0.125)


def test_a_single_problem_shows_its_interval():
    estimate = Estimate(value=0.5, standard_error=float("nan"), low=0.1, high=0.9, num_problems=1)
    assert show(estimate) == "50.0 (10.0 to 90.0) %"


# -- progress ------------------------------------------------------------------------------------------------------


def test_a_line_every_tenth_and_an_eta(capsys: pytest.CaptureFixture[str]):
    progress = EvalProgress(clock=iter([0.0, *(2.0 * i for i in range(1, 30))]).__next__)
    progress.begin("AIME 24", num_problems=30, num_done=10, num_samples=4, num_right=10)
    for _ in range(20):
        progress.problem(1)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "AIME 24  12/30 problems  avg@4 25.0 %  eta 0:36"
    assert lines[-1] == "AIME 24  30/30 problems  avg@4 25.0 %"
    assert len(lines) == 7
