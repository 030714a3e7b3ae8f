"""Recipes, what they extend, and messages that point at the file and line of a mistake."""

import copy
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from rlinf.config.catalog import shipped_recipes
from rlinf.config.load import MAX_LISTED, load_config, load_for_resume, to_yaml
from rlinf.config.overrides import parse_overrides
from rlinf.config.yaml_source import Tree, dump, merge, parse_file
from rlinf.errors import UserError


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Writes a recipe into the current folder and returns its name."""
    monkeypatch.chdir(tmp_path)

    def write(text: str, name: str = "mine.yaml") -> str:
        Path(name).write_text(text, encoding="utf-8")
        return name

    return write


def message(name: str, *arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config(name, parse_overrides(arguments))
    return str(caught.value)


# -- places --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (
            "rollout:\n  temprature: 0.5",
            "mine.yaml:3: rollout.temprature is not a key; did you mean rollout.temperature?",
        ),
        (
            "temperature: 0.5",
            "mine.yaml:2: temperature is not a key; did you mean rollout.temperature or evaluation.temperature?",
        ),
        (
            "reward:\n  colour: red",
            "mine.yaml:3: reward.colour is not a key; keys of reward: kind",
        ),
        ("rollout:\n  temperature: hot", "mine.yaml:3: rollout.temperature='hot'; allowed: a number"),
        ("run:\n  num_steps: 2.5", "mine.yaml:3: run.num_steps=2.5; allowed: a whole number"),
        ("run:\n  num_steps: true", "mine.yaml:3: run.num_steps=true; allowed: a whole number"),
        ("run:\n  num_steps: '3'", "mine.yaml:3: run.num_steps='3'; allowed: a whole number"),
        ("run:\n  num_steps: 0", "mine.yaml:3: run.num_steps=0; allowed: 1 or more"),
        ("run:\n  num_steps: null", "mine.yaml:3: run.num_steps is not set; give --run.num_steps VALUE"),
        ("actor:\n  learning_rate: .nan", "mine.yaml:3: actor.learning_rate=nan; allowed: a finite number"),
        ("actor:\n  betas:\n    - 0.9\n    - x", "mine.yaml:5: actor.betas.1='x'; allowed: a number"),
        ("actor:\n  betas: [0.9]", "mine.yaml:3: actor.betas=[0.9]; allowed: a list with at least 2 entries"),
        (
            "actor:\n  betas: [0.9, 0.9, 0.9]",
            "mine.yaml:3: actor.betas=[0.9, 0.9, 0.9]; allowed: a list with at most 2",
        ),
        ("mode: hybird", "mine.yaml:2: mode='hybird'; allowed: 'auto', 'collocated', 'disaggregated' or 'hybrid'"),
        ("task:\n  kind: srot", "mine.yaml:3: task.kind='srot'; allowed: 'sort', 'add', 'calculate'"),
        (
            "job: reasonning",
            "mine.yaml:2: job='reasonning'; allowed: 'reasoning', 'embodied', 'sft', 'dpo', 'reward_model'",
        ),
        ("rollout: 3", "mine.yaml:2: rollout=3; allowed: a section with the keys engine, engine_options"),
        ("name: a b", "mine.yaml:2: name='a b'; allowed: letters, digits"),
        ("model:\n  dtype: {x}", "mine.yaml:3: model.dtype={'x': None}; allowed: 'float32'"),
        ("rollout:\n  engine: {x}", "mine.yaml:3: rollout.engine={'x': None}; allowed: text; put it in quotes"),
        ("rollout:\n  stop: [no]", "mine.yaml:3: rollout.stop.0=false; allowed: text; put it in quotes"),
        ("seed: 8388608", "mine.yaml:2: seed=8388608; allowed: 8388607 or less"),
    ],
)
def test_a_mistake_is_shown_with_its_file_and_line(recipe, section: str, expected: str):
    text = message(recipe(f"extends: sort-grpo\n{section}\n"))
    assert text.startswith(expected), text


def test_a_mistake_in_what_is_extended_points_there(recipe):
    recipe("extends: sort-grpo\n\nactor:\n  lerning_rate: 1\n", "base.yaml")
    text = message(recipe("extends: base.yaml\nseed: 1\n"))
    assert text == "base.yaml:4: actor.lerning_rate is not a key; did you mean actor.learning_rate?"


def test_all_mistakes_are_listed_together(recipe):
    text = message(recipe("extends: sort-grpo\nseed: x\nmode: y\n"), "--actor.num_shards", "0")
    assert text.splitlines() == [
        "the config has 3 mistakes:",
        "  - mine.yaml:2: seed='x'; allowed: a whole number",
        "  - mine.yaml:3: mode='y'; allowed: 'auto', 'collocated', 'disaggregated' or 'hybrid'",
        "  - --actor.num_shards=0; allowed: 1 or more or 'auto'",
    ]


def test_a_long_list_of_mistakes_is_cut(recipe):
    keys = "".join(f"unknown_{i}: 1\n" for i in range(MAX_LISTED + 7))
    lines = message(recipe("extends: sort-grpo\n" + keys)).splitlines()
    assert len(lines) == MAX_LISTED + 2
    assert lines[-1] == "  - and 7 more"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "",
            "job is not set; give --job VALUE, or write it in a recipe; allowed: 'reasoning', 'embodied', 'sft', "
            "'dpo', 'reward_model'; or let it begin with `extends: NAME`",
        ),
        ("- a\n", "mine.yaml:1: a recipe is a mapping"),
        ("a: [1\nb: 2\n", "mine.yaml:2: not valid YAML"),
        ("a: 1\nb: 2\na: 3\n", "mine.yaml:3: the key 'a' is already on line 1"),
        ("3: x\n", "mine.yaml:1: a key must be text, this is 3"),
        ("a: &x\n  b: *x\n", "mine.yaml:1: nested more than 20 deep"),
        ("a: !!python/object:os.system x\n", "mine.yaml:1: the tag !!python/object:os.system has no meaning here"),
        ("b: 1\na: !!binary aGk=\n", "mine.yaml:2: the tag !!binary has no meaning here"),
        ("a: !!set {b, c}\n", "mine.yaml:1: the tag !!set has no meaning here"),
        ('a: "b \\ud800"\n', "mine.yaml:1: 'b \\ud800' holds half of a character"),
        ("a: Rule: think\n", "mine.yaml:1: not valid YAML: mapping values are not allowed here\nhint: text with ': '"),
        (
            "a: x # y\nb: end with #### and the number\n",
            "mine.yaml:2: YAML takes '#' after a blank for a comment, so the text ends with 'end with'\nhint: put",
        ),
        ("a: \x01\n", "mine.yaml: not valid YAML: unacceptable character"),
    ],
)
def test_what_is_no_recipe_is_refused(recipe, text: str, expected: str):
    assert message(recipe(text)).startswith(expected)


BOMBS = {
    "list": "a0: &a0 [x, x, x, x, x, x, x, x, x]\n"
    + "".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]\n" for i in range(1, 15)),
    "mapping": "a0: &a0 {x: 1, y: 2}\n"
    + "".join(f"a{i}: &a{i} {{x: *a{i - 1}, y: *a{i - 1}}}\n" for i in range(1, 19)),
    "merge": "a0: &a0 {x: 1}\n" + "".join(f"a{i}: &a{i} {{<<: *a{i - 1}, k{i}: 1}}\n" for i in range(1, 400)),
    "endless": "a: &a\n  <<: *a\n",
    "brackets": "a: " + "[" * 100_000,
    "braces": "a: " + "{b: " * 100_000,
    "number": "a: " + "9" * 100_000,
    "hexadecimal": "a: 0x" + "f" * 100_000,
    "base 60": "a: !!int " + ":".join(["59"] * 20_000),
    "boolean": "a: !!bool word\n",
    "time": "a: !!timestamp word\n",
    "key": "? [a]\n: 1\n",
    "bytes": "a: 1\n# " + "x" * (1 << 20),
}


@pytest.mark.parametrize("name", BOMBS)
def test_what_unfolds_to_more_than_any_recipe_has_is_refused_on_one_line(recipe, name: str):
    text = message(recipe(BOMBS[name]))
    assert text.startswith("mine.yaml:") and max(map(len, text.splitlines())) < 200


def test_numbers_are_to_the_base_that_they_look_like():
    values = parse_file("a: 1:30\nb: 0x1f\nc: 010\nd: -7\n", "x").values
    assert values == {"a": "1:30", "b": 31, "c": "010", "d": -7}


@pytest.mark.parametrize(
    "text", ["'end with #### x'", '"end with #### x"', "|-\n  end with #### x", ">-\n  end with #### x"]
)
def test_text_in_quotes_and_blocks_may_hold_what_looks_like_a_comment(text: str):
    assert parse_file(f"a: {text}\n# end with a comment\nb: [two words] # more\n", "x").values["a"] == "end with #### x"


# -- finding and extending -----------------------------------------------------------------------------------------


def test_an_unknown_recipe_is_answered_with_a_close_one(recipe):
    text = message("sort-grop")
    assert text.startswith("'sort-grop' is neither a shipped recipe nor a YAML file; did you mean sort-grpo?")
    assert f"shipped recipes: {', '.join(shipped_recipes())}" in text


def test_a_missing_file_and_a_file_of_another_kind_are_named(recipe):
    assert message("absent.yaml").startswith("absent.yaml: No such file or directory")
    assert message(recipe("x", "recipe.txt")) == "recipe.txt: a recipe's file ends in .yaml or .yml"


def test_extends_names_the_line_of_a_recipe_that_does_not_exist(recipe):
    text = message(recipe("name: x\nextends: sort-grop\n"))
    assert text.startswith(
        "mine.yaml:2: 'sort-grop' is neither a shipped recipe nor a YAML file; did you mean sort-grpo?"
    )
    assert message(recipe("extends: [sort-grpo]\n")).startswith("mine.yaml:1: extends=['sort-grpo'] must be the name")


def test_recipes_that_extend_one_another_in_a_circle_are_refused(recipe):
    recipe("extends: mine.yaml\n", "other.yaml")
    text = message(recipe("extends: other.yaml\n"))
    assert text.startswith("other.yaml:1: recipes extend one another in a circle: ")
    assert text.count("mine.yaml") == 2


def test_extends_is_relative_to_the_file_that_says_it(recipe, tmp_path: Path):
    (tmp_path / "deep").mkdir()
    recipe("extends: sort-grpo\nseed: 3\n", "deep/base.yaml")
    recipe("extends: base.yaml\nname: inner\n", "deep/mine.yaml")
    config = load_config("deep/mine.yaml")
    assert (config.seed, config.name) == (3, "inner")


def test_another_task_kind_starts_the_task_afresh(recipe):
    recipe("extends: sort-grpo\ntask:\n  kind: sort\n  num_held_out: 7\n", "base.yaml")
    same = load_config(recipe("extends: base.yaml\ntask:\n  kind: sort\n")).model_dump()["task"]
    other = load_config(recipe("extends: base.yaml\ntask:\n  kind: add\n")).model_dump()["task"]
    assert same == {"kind": "sort", "num_held_out": 7, "num_digits": 8}
    assert other == {"kind": "add", "num_held_out": 500, "num_digits": 2}


KEYS = st.sampled_from(["a", "b", "c"])
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(-5, 5), st.lists(st.integers(0, 3), max_size=2))
TREES = st.dictionaries(KEYS, st.recursive(LEAVES, lambda inner: st.dictionaries(KEYS, inner, max_size=3)), max_size=3)


def flat(values: dict, key: tuple = ()) -> dict:
    """Reference view of a tree: path -> leaf; an empty section is a leaf."""
    leaves = {}
    for name, value in values.items():
        leaves |= flat(value, (*key, name)) if isinstance(value, dict) and value else {(*key, name): value}
    return leaves


@given(base=TREES, over=TREES)
def test_merge_replaces_what_the_upper_names_and_keeps_the_rest(base: dict, over: dict):
    untouched = copy.deepcopy((base, over))
    merged = merge(Tree(values=base), Tree(values=over)).values
    upper = flat(over)
    for path, value in upper.items():
        node = merged
        for part in path:
            node = node[part]
        # An empty section on top of a section adds nothing to it.
        assert node == value or (value == {} and isinstance(node, dict))
    for path, value in flat(base).items():
        replaced = any(path[: len(other)] == other or other[: len(path)] == path for other in upper)
        if not replaced:
            assert flat(merged)[path] == value
    assert (base, over) == untouched


@given(values=TREES)
def test_a_tree_merged_with_itself_or_with_nothing_is_the_same(values: dict):
    tree, nothing = Tree(values=values), Tree(values={})
    assert merge(tree, tree).values == merge(nothing, tree).values == merge(tree, nothing).values == values


def test_places_follow_the_file_that_won():
    base = parse_file("a:\n  b: 1\n  c: 2\n", "base.yaml")
    over = parse_file("a:\n  b: 3\n", "over.yaml")
    places = merge(base, over).places
    assert (places["a", "b"], places["a", "c"]) == ("over.yaml:2", "base.yaml:3")


# -- numbers and round trip ----------------------------------------------------------------------------------------


def test_numbers_are_those_of_yaml_1_2():
    tree = parse_file("a: 1e-6\nb: 1.5e3\nc: 2020-01-01\nd: .5\ne: -3\nf: 1e\n", "x.yaml")
    assert tree.values == {"a": 1e-6, "b": 1500.0, "c": "2020-01-01", "d": 0.5, "e": -3, "f": "1e"}


SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12),
    st.from_regex(r"[-+0-9.eE_:]{1,6}", fullmatch=True),
)


@given(
    values=st.dictionaries(
        st.text(min_size=1, max_size=5), st.one_of(SCALARS, st.lists(SCALARS, max_size=3)), max_size=4
    )
)
def test_what_is_dumped_is_read_back_the_same(values: dict):
    assert parse_file(dump(values), "x.yaml").values == values


@pytest.mark.parametrize("name", ["1e6", "123", "true", "null", "2020-01-01", "0x10", "1_0", "a.b-c_d"])
def test_a_name_that_looks_like_another_type_survives_the_run_folder(tmp_path: Path, name: str):
    config = load_config("sort-grpo", parse_overrides([f"--name={name}"]))
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert load_for_resume(tmp_path) == config


# -- resume --------------------------------------------------------------------------------------------------------


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    (tmp_path / "config.yaml").write_text(to_yaml(load_config("sort-grpo")))
    return tmp_path


def test_resume_may_change_the_section_run(run_folder: Path):
    config = load_for_resume(run_folder, parse_overrides(["--run.num_steps", "900", "--run.max_minutes=null"]))
    assert (config.run.num_steps, config.run.max_minutes) == (900, None)
    assert config.model_copy(update={"run": None}) == load_config("sort-grpo").model_copy(update={"run": None})


@pytest.mark.parametrize(
    ("argument", "change"),
    [
        ("--seed=1", "--seed would change seed from 0 to 1"),
        ("--actor.learning_rate=1e-3", "--actor.learning_rate would change actor.learning_rate from 0.0003 to 0.001"),
        ("--sft_warm_up=null", "--sft_warm_up would change sft_warm_up from {'target_accuracy'"),
    ],
)
def test_resume_refuses_other_overrides(run_folder: Path, argument: str, change: str):
    with pytest.raises(UserError, match="a resumed run goes on with the config it was started with") as caught:
        load_for_resume(run_folder, parse_overrides([argument, "--run.num_steps=900"]))
    assert f"  - {change}" in str(caught.value)
    keys = "run, mode, plan, cluster, venvs, actor.backend, actor.backend_options"
    assert f"only {keys} and keys below them may change" in str(caught.value)
    assert "--run." not in str(caught.value)


def test_a_run_may_go_on_elsewhere(run_folder: Path):
    arguments = ["--mode=disaggregated", "--cluster.num_devices=2", "--plan.granularity.rollout=4"]
    config: Any = load_for_resume(run_folder, parse_overrides([*arguments, "--actor.backend=fsdp2"]))
    assert config.actor.backend == "fsdp2"
    assert (config.mode, config.cluster.num_devices, config.plan.granularity) == ("disaggregated", 2, {"rollout": 4})


def test_resume_accepts_an_override_that_changes_nothing(run_folder: Path):
    assert load_for_resume(run_folder, parse_overrides(["--seed=0"])) == load_config("sort-grpo")


def test_resume_of_no_run_says_so(tmp_path: Path):
    with pytest.raises(UserError, match=r"nothing to resume, the folder holds no config\.yaml"):
        load_for_resume(tmp_path)
    with pytest.raises(UserError, match="nothing to resume, there is no such folder"):
        load_for_resume(tmp_path / "absent")
