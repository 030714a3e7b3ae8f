"""Protocols, and the comparison of finished evaluations."""

import dataclasses
import json
import re
from pathlib import Path

import pytest

from rlinf import UserError
from rlinf.playing import finished
from rlinf.playing.comparison_scores import paired, summary_lines, task_rows
from rlinf.playing.protocol import Protocol, check_same, differing

PROTOCOL = Protocol(
    kind="libero",
    env="libero_spatial",
    first_seed=0,
    num_episodes=4,
    max_episode_steps=220,
    ends_early=True,
    chunk_size=8,
    acting={"num_denoising_steps": "10", "dtype": "float32"},
    simulator={"option.num_wait_steps": "10", "version.mujoco": "3.8.1"},
)


def test_the_digest_depends_on_every_field_and_on_no_order():
    other_values = {
        "kind": "metaworld",
        "env": "libero_goal",
        "first_seed": 1,
        "num_episodes": 5,
        "max_episode_steps": 280,
        "ends_early": False,
        "chunk_size": 1,
        "acting": {"num_denoising_steps": "4"},
        "simulator": {**PROTOCOL.simulator, "version.mujoco": "3.3.2"},
        "disturbance": {"noise": "0.3"},
    }
    assert set(other_values) == {field.name for field in dataclasses.fields(Protocol)}
    digests = {dataclasses.replace(PROTOCOL, **{name: value}).digest for name, value in other_values.items()}
    assert len(digests | {PROTOCOL.digest}) == len(other_values) + 1
    turned = dataclasses.replace(PROTOCOL, simulator=dict(reversed(PROTOCOL.simulator.items())))
    assert turned.digest == PROTOCOL.digest
    stored = json.loads(json.dumps(PROTOCOL.to_json()))
    assert stored["digest"] == PROTOCOL.digest and differing(stored, PROTOCOL.to_json()) == {}


def test_a_protocol_is_shown_in_one_line():
    assert PROTOCOL.line == (
        f"protocol {PROTOCOL.digest[:12]}: libero libero_spatial, seeds 0 to 3, at most 220 actions or to the "
        "environment's end, 8 actions an answer, mujoco 3.8.1"
    )


def test_a_message_names_the_first_keys_that_differ():
    other = dataclasses.replace(
        PROTOCOL,
        chunk_size=1,
        acting={"dtype": "bfloat16"},
        simulator={**PROTOCOL.simulator, "option.num_wait_steps": "15"},
    )
    expected = (
        "A and B were not evaluated alike, so a difference would not be the policies' alone:\n"
        "  - chunk_size: 8 and 1\n  - acting.dtype: float32 and bfloat16\n"
        "  - simulator.option.num_wait_steps: 10 and 15"
    )
    with pytest.raises(UserError, match=re.escape(expected)):
        check_same(PROTOCOL.to_json(), other.to_json(), ("A", "B"))


def test_options_that_only_one_of_two_policies_has_are_no_other_conditions():
    other = dataclasses.replace(PROTOCOL, acting={"dtype": "float32", "center_crop": "True"})
    check_same(PROTOCOL.to_json(), other.to_json(), ("A", "B"))
    assert other.digest != PROTOCOL.digest


def rows(successes: str, tasks: str = "") -> list[dict]:
    """Episodes with the seeds 0, 1, ...; + is a success."""
    return [
        {"task": tasks[seed] if tasks else None, "seed": seed, "success_at_end": sign == "+", "return": 0.0}
        for seed, sign in enumerate(successes)
    ]


def test_episodes_are_joined_by_task_and_seed():
    score = paired(rows("++--", "rprp"), list(reversed(rows("+-+-", "rprp"))))
    assert [(start.task, start.seed, start.a, start.b) for start in score.flipped] == [
        ("p", 1, True, False),
        ("r", 2, False, True),
    ]
    assert [row[:5] for row in task_rows(score)] == [
        ("p", "2", "50.0%", "0.0%", "-50.0"),
        ("r", "2", "50.0%", "100.0%", "+50.0"),
    ]


def test_the_verdict_names_the_better_policy_or_what_it_would_take():
    lines = summary_lines(paired(rows("-" * 12), rows("+" * 10 + "--")), ("one", "two"))
    assert lines[-1] == "B is better than A on these tasks (p = 0.00195)"
    lines = summary_lines(paired(rows("++--" * 5), rows("+-+-" * 5)), ("one", "two"))
    assert lines[-1].startswith(
        "no difference is shown (p = 1); to find one of two points with a chance of 80 %, play 9,"
    )
    assert lines[0] == "A: 50.0% (29.9% to 70.1%) of 20 episodes, one"


def folder(path: Path, successes: str, protocol: Protocol) -> Path:
    path.mkdir()
    result = {"checkpoint": f"runs/{path.name}", "protocol": protocol.to_json(), "num_episodes": len(successes)}
    (path / "result.json").write_text(json.dumps(result))
    (path / "episodes.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows(successes)))
    return path


def test_finished_evaluations_are_compared_from_their_files(tmp_path):
    a, b = folder(tmp_path / "a", "++--", PROTOCOL), folder(tmp_path / "b", "+++-", PROTOCOL)
    assert finished.is_finished(a) and not finished.is_finished(tmp_path)
    evaluations = [finished.read_finished(path) for path in (a, b)]
    finished.compare(evaluations, tmp_path / "out", force=False, command=["rlinf"])
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["difference"] == 0.25 and result["protocol"] == PROTOCOL.to_json()
    assert result["flipped"] == [{"task": "", "seed": 2, "a": False, "b": True}]
    assert "B - A" in (tmp_path / "out" / "compare.html").read_text()


def test_finished_evaluations_under_other_protocols_need_force(tmp_path):
    longer = dataclasses.replace(PROTOCOL, max_episode_steps=280)
    evaluations = [
        finished.read_finished(folder(tmp_path / "a", "++--", PROTOCOL)),
        finished.read_finished(folder(tmp_path / "b", "+++-++", longer)),
    ]
    with pytest.raises(UserError, match="  - max_episode_steps: 220 and 280"):
        finished.compare(evaluations, tmp_path / "out", force=False, command=["rlinf"])
    assert not (tmp_path / "out").exists()
    finished.compare(evaluations, tmp_path / "out", force=True, command=["rlinf"])
    result = json.loads((tmp_path / "out" / "result.json").read_text())
    assert result["notes"] == ["2 starts are not in both evaluations and were left out"]
    assert result["protocol"].keys() == {"a", "b"}


def test_a_folder_without_a_protocol_is_refused(tmp_path):
    old = folder(tmp_path / "old", "+", PROTOCOL)
    (old / "result.json").write_text('{"num_episodes": 1}')
    with pytest.raises(UserError, match="has no protocol, so what was evaluated is unknown"):
        finished.read_finished(old)


def test_many_variants_are_shown_by_their_groups():
    groups = {"x": "camera", "y": "camera", "z": "noise"}
    table = task_rows(paired(rows("++-", "xyz"), rows("+-+", "xyz"), groups))
    assert [row[:4] for row in table] == [("camera", "2", "100.0%", "50.0%"), ("noise", "1", "0.0%", "100.0%")]
