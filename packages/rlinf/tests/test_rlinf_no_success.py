"""A run of a trained policy that begins without a success notes it, since there is little to reinforce."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from rlinf.jobs.embodied.job import RETURN, SUCCESS, EmbodiedJob
from rlinf.loop.training_loop import TrainingLoop


def _notes(
    before: float,
    *,
    has_warm_up: bool = False,
    folder: str | None = None,
    score: Any = SUCCESS,
    asks_expert: bool = False,
) -> list[str]:
    options = {} if folder is None else {"folder": folder}
    config = SimpleNamespace(policy=SimpleNamespace(options=options), env=SimpleNamespace(num_eval_episodes=32))
    learning = SimpleNamespace(queries=lambda _: object() if asks_expert else None)
    job = SimpleNamespace(config=config, score=score, _sft_warm_up=has_warm_up, _learning=learning, _needs=None)
    notes: list[str] = []
    session = SimpleNamespace(note=notes.append, folder=Path("runs/reach-1"))
    EmbodiedJob.before_training(cast(Any, job), cast(Any, session), before)
    return notes


def test_a_trained_policy_without_a_success_is_noted_with_the_command_that_explains_it():
    (warmed,) = _notes(0.0, has_warm_up=True)
    assert "the SFT warm-up solves none of 32 episodes" in warmed
    assert "rlinf check runs/reach-1 names it" in warmed
    (published,) = _notes(0.0, folder="openvla-oft")
    assert "the checkpoint openvla-oft solves none" in published


def test_nothing_is_noted_after_a_success_or_where_none_is_expected():
    assert not _notes(1 / 32, has_warm_up=True)
    assert not _notes(0.0)  # random weights
    assert not _notes(0.0, has_warm_up=True, score=RETURN)  # the environment judges no success
    assert not _notes(0.0, has_warm_up=True, asks_expert=True)  # who helps where nothing succeeds


def test_the_job_gets_the_score_of_the_evaluation_before_the_first_step():
    scores: list[float] = []
    loop: Any = SimpleNamespace(
        _session=SimpleNamespace(executor=None, sync_weights=lambda: None, stage_s={}),
        _folder=SimpleNamespace(latest_checkpoint=lambda: None),
        _flows=(),
        _job=SimpleNamespace(prepare=lambda _: None, before_training=lambda _, score: scores.append(score)),
        _only_measures=False,
        _clock=SimpleNamespace(before=None),
        _evaluate=lambda: 0.25,
        _save_checkpoint=lambda: None,
        progress=SimpleNamespace(doing=nullcontext),
    )
    assert TrainingLoop._start(loop, cast(Any, None)) == 0.25
    assert scores == [0.25]
