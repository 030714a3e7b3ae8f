"""What a session does with the verdict on engine and trainer."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf.console.progress import Progress
from rlinf.errors import RunFailed
from rlinf.jobs.agreement import arithmetic_of, judge_step
from rlinf.loop.deadlines import Deadlines
from rlinf.loop.session import Session
from rlinf.run_folder import RunFolder

HOW = arithmetic_of({"num_hidden_layers": 2}, trained_dtype="float32", served_dtype="float32", temperature=1.0)
GAP = {"rollout/logprob_gap_kl": 1e-14, "rollout/logprob_gap_p999": 1e-7, "rollout/logprob_gap_max": 2e-7}
WRONG = GAP | {"rollout/logprob_gap_kl": 1e-3}


@pytest.fixture
def session(tmp_path: Path):
    """Makes a session of a job whose metrics are judged by `HOW`, and the stream that it writes to."""

    def make(*, stops: bool = False) -> tuple[Session, io.StringIO, Path]:
        folder = RunFolder(tmp_path / "run", config_yaml="name: x\n", command=["rlinf"], keep_checkpoints=1)
        job: Any = SimpleNamespace(agreement=lambda metrics: judge_step(HOW, metrics), stops_on_mismatch=stops)
        unused: Any = None
        stream = io.StringIO()
        run_session = Session(job, unused, unused, folder, Progress(total=1, stream=stream), Deadlines(None))
        return run_session, stream, folder.path / "manifest.json"

    return make


def test_the_first_step_with_a_trained_token_is_judged_and_no_other(session):
    run_session, stream, manifest = session()
    for step, metrics in enumerate([{"reward/mean": 0.0}, GAP, WRONG]):
        run_session.judge(metrics, step)
    assert stream.getvalue().count("\n") == 1
    assert stream.getvalue().startswith("engine and trainer agree about the sampled tokens: KL 1e-14 nats a token")
    verdict = json.loads(manifest.read_text())["sessions"][-1]["agreement"]
    assert (verdict["step"], verdict["agrees"], verdict["suspects"]) == (1, True, [])


def test_a_mismatch_is_told_once_noted_and_the_run_goes_on(session):
    run_session, stream, manifest = session()
    run_session.judge(WRONG, 0)
    run_session.judge(WRONG, 1)
    assert stream.getvalue().count("do NOT agree") == 1
    assert [line.strip()[:10] for line in stream.getvalue().splitlines()[2:5]] == [
        "1. version",
        "2. tempera",
        "3. tokeniz",
    ]
    values = json.loads(manifest.read_text())
    assert values["notes"] == [values["sessions"][-1]["agreement"]["summary"]]


def test_a_mismatch_ends_a_run_that_is_to_stop(session):
    run_session, _, manifest = session(stops=True)
    with pytest.raises(RunFailed, match=r"step 0: engine and trainer do NOT agree(.|\n)*hint: --rollout.stop_on_mism"):
        run_session.judge(WRONG, 0)
    assert json.loads(manifest.read_text())["sessions"][-1]["agreement"]["agrees"] is False
