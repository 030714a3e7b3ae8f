"""`rlinf config explain KEY`: what is printed of a key, under all its names."""

import pytest

from rlinf.cli.main import main
from rlinf.config.evaluation import EvalConfig
from rlinf.config.explain_key import explain_key
from rlinf.config.foreign_names import FOREIGN
from rlinf.config.messages import all_keys, dotted
from rlinf.config.schema import SHIPPED


def test_a_key_with_defaults_by_algorithm_and_recipes_that_set_it(capsys: pytest.CaptureFixture[str]):
    assert main(["config", "explain", "algorithm.clip_high"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "algorithm.clip_high"
    assert lines[1].startswith("  The probability ratio is clipped above at 1 + clip_high; ")
    facts = {line[2:15].strip(): line[15:] for line in lines[2:]}
    assert facts["type"] == "number or null"
    assert facts["default"].startswith("0.2; 0.28 in dapo;")
    assert "0.28 in libero-oft-grpo" in facts["set by"]
    assert facts["key of"] == "recipes with job: reasoning, recipes with job: embodied"
    assert facts["also called"] == "clip_ratio_high, epsilon_high (TRL, verl, OpenRLHF)"
    assert facts["see"] == "docs/algorithms.md"
    assert not any("\x1b" in line for line in lines)


def test_allowed_values_of_a_choice_and_keys_of_a_section():
    ((_, (choice,)), (_, (section, _))) = explain_key("cluster.device"), explain_key("actor.lora")
    assert choice.entry.type == '"auto" or "gpu" or "cpu"'
    assert [member.key for member in section.members][-1] == "actor.lora.targets"


@pytest.mark.parametrize(
    ("name", "key", "note"),
    [
        ("clip_high", "algorithm.clip_high", "clip_high: the whole key is algorithm.clip_high"),
        ("num_generations", "algorithm.group_size", "num_generations of TRL, verl or OpenRLHF is algorithm.group_size"),
        ("actor_rollout_ref.actor.optim.lr", "actor.learning_rate", "is actor.learning_rate here"),
        ("task.prompt_field", "task.columns.prompt", "--task.prompt_field is now called --task.columns.prompt"),
        ("benchmarks.mine.template", "benchmarks.<name>.prompt_template", "is now called"),
        ("benchmarks.mine.file", "benchmarks.<name>.file", None),
    ],
)
def test_other_names_of_a_key(name: str, key: str, note: str | None):
    notes, explanations = explain_key(name)
    assert explanations[0].entry.key == key
    assert len(notes) == (note is not None)
    assert all(note is not None and note in text for text in notes)


def test_a_key_may_be_written_as_an_option(capsys: pytest.CaptureFixture[str]):
    assert main(["config", "explain", "--rollout.temperature=0.8"]) == 0
    assert capsys.readouterr().out.startswith("rollout.temperature\n")
    assert main(["config", "explain"]) == 2
    assert "give a key" in capsys.readouterr().err


def test_a_wrong_key_gets_the_closest_ones(capsys: pytest.CaptureFixture[str]):
    assert main(["config", "explain", "algorithm.cliphigh"]) == 2
    assert "'algorithm.cliphigh' is not a key; did you mean algorithm.clip_high or" in capsys.readouterr().err
    assert main(["config", "explain", "rollout.temprature"]) == 2
    assert "did you mean rollout.temperature" in capsys.readouterr().err


def test_every_key_is_explained_and_names_a_page():
    """Those of the sections that are written down, without the kinds that values choose."""
    keys = {dotted(key) for model in (*SHIPPED, EvalConfig) for key in all_keys(model, (), {})}
    for key in sorted(keys)[::9]:
        explanations = explain_key(key)[1]
        assert explanations and all(
            one.entry.meaning and one.page.partition("#")[0].endswith(".md") for one in explanations
        )
    for name, ours in list(FOREIGN.items())[::7]:
        assert name in explain_key(ours)[1][0].other_names
