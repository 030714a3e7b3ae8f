"""Keys under the name that they had in the version before."""

from pathlib import Path

import pytest
import yaml

from rlinf.cli.main import main
from rlinf.config.load import load_config, load_for_resume, to_yaml
from rlinf.config.overrides import parse_overrides
from rlinf.config.renamed import RENAMED, renamed_overrides, renamed_tree
from rlinf.config.yaml_source import Key, Tree
from rlinf.errors import UserError


@pytest.fixture
def table(monkeypatch: pytest.MonkeyPatch):
    """A table with a section, one of its keys, and a key that goes into another section."""
    monkeypatch.setattr("rlinf.config.renamed.RENAMED", {"old": "new", "a.first": "a.second", "a.b": "c.d"})


def test_a_section_a_key_and_a_key_of_another_section_get_their_new_names(table):
    tree = Tree(
        values={"old": {"x": 1, "y": [2]}, "a": {"first": 3, "b": 4}},
        places={("old",): "f:1", ("old", "x"): "f:2", ("old", "y", 0): "f:3", ("a", "first"): "f:5", ("a", "b"): "f:6"},
    )
    result = renamed_tree(tree)
    assert result.values == {"new": {"x": 1, "y": [2]}, "a": {"second": 3}, "c": {"d": 4}}
    assert result.places == {
        ("new",): "f:1",
        ("new", "x"): "f:2",
        ("new", "y", 0): "f:3",
        ("a", "second"): "f:5",
        ("c", "d"): "f:6",
    }
    assert result.notes[0] == "f:1: old is now called new; the old name is accepted in this version alone"
    assert len(result.notes) == 3 and renamed_tree(result) == result


def test_overrides_below_a_renamed_section_follow_it(table):
    overrides, notes = renamed_overrides(parse_overrides(["--old.x=1", "--older=2", "--a.b.c", "3"]))
    assert [override.flag for override in overrides] == ["--new.x", "--older", "--c.d.c"]
    assert [note.split(";")[0] for note in notes] == [
        "--old.x is now called --new.x",
        "--a.b.c is now called --c.d.c",
    ]


def test_names_that_users_choose_stay_where_they_are():
    old = {"file": "a.csv", "question_field": "q", "answer_field": None, "template": "{question}"}
    places: dict[Key, str] = {
        ("benchmarks", "mine", "question_field"): "f:2",
        ("benchmarks", "mine", "template"): "f:3",
    }
    result = renamed_tree(Tree(values={"benchmarks": {"mine": old, "gsm8k": "b.csv"}}, places=places))
    new = {"file": "a.csv", "columns": {"prompt": "q"}, "prompt_template": "{question}"}
    assert result.values == {"benchmarks": {"mine": new, "gsm8k": "b.csv"}}
    assert [note.split(";")[0] for note in result.notes] == [
        "f:2: benchmarks.mine.question_field is now called benchmarks.mine.columns.prompt",
        "f:3: benchmarks.mine.template is now called benchmarks.mine.prompt_template",
    ]
    written = ["--benchmarks.mine.answer_field=a", "--benchmarks.gsm8k=b.csv", "--benchmarks.mine.template={question}"]
    overrides, notes = renamed_overrides(parse_overrides(written))
    assert [override.flag for override in overrides] == [
        "--benchmarks.mine.columns.answer",
        "--benchmarks.gsm8k",
        "--benchmarks.mine.prompt_template",
    ]
    assert len(notes) == 2


def test_both_names_at_once_are_an_error(table):
    with pytest.raises(UserError, match=r"^f:7: old is the old name of new, and both are set"):
        renamed_tree(Tree(values={"old": 1, "new": 2}, places={("old",): "f:7"}))
    with pytest.raises(UserError, match=r"^--old\.x is the old name of --new\.x, and both are set"):
        renamed_overrides(parse_overrides(["--new.x=1", "--old.x=1"]))


def test_no_new_name_is_an_old_one():
    assert not {new for new in RENAMED.values() if new in RENAMED}


def test_a_recipe_an_override_and_a_run_folder_may_have_the_old_names(tmp_path: Path):
    recipe = tmp_path / "mine.yaml"
    recipe.write_text("extends: sort-grpo\ncluster:\n  weight_link: streams\n  weight_link_options: {deltas: false}\n")
    config = load_config(str(recipe), parse_overrides(["--cluster.weight_link_options.host=x"]))
    assert config.cluster.weight_sync == "streams"
    assert config.cluster.weight_sync_options == {"deltas": False, "host": "x"}
    assert [note.split(" is ")[0] for note in config.notes] == [
        f"{recipe}:3: cluster.weight_link",
        f"{recipe}:4: cluster.weight_link_options",
        "--cluster.weight_link_options.host",
    ]
    stored = tmp_path / "config.yaml"
    values = yaml.safe_load(to_yaml(config))
    values["cluster"]["weight_link"] = values["cluster"].pop("weight_sync")
    stored.write_text(yaml.safe_dump(values))
    resumed = load_for_resume(tmp_path, parse_overrides(["--run.num_steps=30"]))
    assert resumed.cluster == config.cluster and resumed.run.num_steps == 30
    assert len(resumed.notes) == 1


def test_the_note_is_on_the_terminal_and_in_the_manifest(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    line = "train sort-grpo --run.num_steps 1 --mode collocated --sft_warm_up null --cluster.num_devices 1"
    assert main([*line.split(), "--cluster.weight_link", "shared", "--output", str(tmp_path / "run")]) == 0
    note = "--cluster.weight_link is now called --cluster.weight_sync"
    assert note in "".join(capsys.readouterr())
    assert note in (tmp_path / "run" / "manifest.json").read_text()
