"""Overrides on the command line: how they are told from options, read and applied."""

from pathlib import Path
from typing import Literal

import pytest
import yaml
from hypothesis import given, strategies as st

from rlinf.config import yaml_source
from rlinf.config.annotations import annotation_at
from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.foreign_names import FOREIGN
from rlinf.config.load import load_config
from rlinf.config.overrides import Override, apply_overrides, parse_overrides, split_overrides
from rlinf.config.reasoning import ReasoningConfig
from rlinf.config.schema import Shipped
from rlinf.config.tasks import FilesTask
from rlinf.config.yaml_source import Tree
from rlinf.errors import UserError

OPTIONS = {"--output", "--resume", "-h"}


def message(*arguments: str) -> str:
    with pytest.raises(UserError) as caught:
        load_config("sort-grpo", parse_overrides(arguments))
    return str(caught.value)


# -- telling them apart --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "own_arguments", "overrides"),
    [
        ("sort --a.b 3", "sort", "--a.b 3"),
        ("--a.b 3 sort", "sort", "--a.b 3"),
        ("--a.b=3 sort", "sort", "--a.b=3"),
        ("--resume --output x --run.num_steps 5", "--resume --output x", "--run.num_steps 5"),
        ("--seed -1 sort", "sort", "--seed -1"),
        ("--a --output x", "--output x", "--a"),
        ("sort x -q", "sort x -q", ""),
        ("--output=x -- --a 3", "--output=x --", "--a 3"),
        ("--outpu x", "", "--outpu x"),
    ],
)
def test_options_and_overrides_are_told_apart(line: str, own_arguments: str, overrides: str):
    assert split_overrides(line.split(), OPTIONS) == (own_arguments.split(), overrides.split())


FLAGS = st.from_regex(r"--[a-z]{1,3}(\.[a-z]{1,3}){0,2}", fullmatch=True)
VALUES = st.from_regex(r"-?[a-z0-9]{1,3}", fullmatch=True)


@given(words=st.lists(VALUES, max_size=2), pairs=st.lists(st.tuples(FLAGS, VALUES), max_size=3), order=st.randoms())
def test_the_order_of_words_and_overrides_does_not_matter(words, pairs, order):
    blocks = [[word] for word in words] + [list(pair) for pair in pairs]
    order.shuffle(blocks)
    own_arguments, overrides = split_overrides([argument for block in blocks for argument in block], OPTIONS)
    assert sorted(own_arguments) == sorted(words)
    assert [*zip(overrides[::2], overrides[1::2], strict=True)] == [tuple(b) for b in blocks if len(b) == 2]


# -- reading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-6", 1e-6),
        ("true", True),
        ("null", None),
        ("", None),
        ("word", "word"),
        ("'3'", "3"),
        ("[a, 2]", ["a", 2]),
        ("{x: 1}", {"x": 1}),
        ("2020-01-01", "2020-01-01"),
        ("a=b", "a=b"),
    ],
)
def test_a_value_is_yaml_where_its_key_is_not_text(text: str, value: object):
    assert (
        parse_overrides([f"--a.b={text}"]) == parse_overrides(["--a.b", text]) == [Override(key=("a", "b"), text=text)]
    )
    assert Override(key=("a", "b"), text=text).value(dict) == value


TEXTS = (
    "Solve {question} and end with #### and the number.",
    "{question}",
    "Rule: {question}",
    "# {question}",
    "'{question}' is 'it'",
    "[{question}",
    "*{question}\\n",
)


@pytest.mark.parametrize("text", TEXTS)
def test_text_is_taken_as_it_stands(text: str):
    files = ["--model.path", "a: # b", "--task.train_files", "c #1.jsonl", "--task.eval_files=[d.jsonl, 'e, f.jsonl']"]
    texts = ["--task.prompt_template", text, f"--task.system_prompt={text}", f"--task.chat_options.x={text}"]
    config = load_config("gsm8k-grpo", parse_overrides([*files, *texts, "--rollout.stop", "# stop", "--name=1e6"]))
    assert isinstance(config, ReasoningConfig) and isinstance(config.task, FilesTask)
    assert (config.task.prompt_template, config.task.system_prompt, config.name) == (text, text, "1e6")
    assert config.task.chat_options["x"] == text
    assert (config.rollout.stop, config.model.path) == (("# stop",), Path.cwd() / "a: # b")
    assert config.task.train_files == (Path.cwd() / "c #1.jsonl",)
    assert config.task.eval_files == (Path.cwd() / "d.jsonl", Path.cwd() / "e, f.jsonl")


@pytest.mark.parametrize(
    ("annotation", "text", "value"),
    [
        (str, "null", "null"),
        (str, "", ""),
        (str | None, "null", None),
        (str | None, "3", "3"),
        (str, '"3\\n"', "3\n"),
        (str, "'a' # 'b'", "'a' # 'b'"),
        (str | None, "'null'", "null"),
        (float | str, "true", "true"),
        (float | str, "3", 3),
        (Path | None, "", None),
        (Literal["auto", "off"], "off", "off"),
        (int | Literal["auto"], "3", 3),
        (bool | float | str, "1e-3", 1e-3),
        (bool | float | str, "off # x", "off # x"),
        (bool | float | str, "'3'", "3"),
        (bool | float | str, "[a]", "[a]"),
        (bool | float | str | list[str], "[a]", ["a"]),
        (tuple[str, ...] | None, "null", None),
        (tuple[int, ...], "[1, 2]", [1, 2]),
    ],
)
def test_the_type_of_a_key_decides_how_its_text_is_read(annotation: object, text: str, value: object):
    assert Override(key=("a",), text=text).value(annotation) == value


JSON = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=8)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=4), inner, max_size=3)),
    max_leaves=6,
)


@given(value=JSON)
def test_every_value_comes_back_from_its_flow_style_yaml(value: object):
    style = '"' if isinstance(value, str) else None
    text = yaml.dump(value, Dumper=yaml_source._Dumper, default_flow_style=True, default_style=style)
    assert Override(key=("a",), text=text).value(None) == value


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["word"], "'word' is neither an option nor an override"),
        (["--a..b=3"], "'--a..b=3' is neither an option nor an override"),
        (["--a"], "--a has no value\nhint: write --a VALUE or --a=VALUE"),
        (["--a", "--b", "3"], "--a has no value"),
        (["--a", "x\udcff"], "--a='x\\udcff' is not UTF-8 text"),
    ],
)
def test_what_is_no_override_is_refused(arguments: list[str], expected: str):
    with pytest.raises(UserError) as caught:
        parse_overrides(arguments)
    assert str(caught.value).startswith(expected)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[1", "--a='[1': not a YAML value: "),
        ("{b: c: d}", "--a='{b: c: d}': not a YAML value: "),
        ("&x [*x]", "--a='&x [*x]': not a YAML value: the value:1: nested more than 20 deep"),
        ("!!python/object:os.system x", "--a='!!python/object:os.system x': not a YAML value: "),
        ("{b: 1, b: 2}", "--a='{b: 1, b: 2}': not a YAML value: the value:1: the key 'b' is already"),
        ("9" * 5000, "--a='9999"),
        ("3 # 4", "--a='3 # 4': not a YAML value: '# 4' is a comment in YAML and would be dropped"),
        ("{b: 1} # c", "--a='{b: 1} # c': not a YAML value: '# c' is a comment"),
    ],
)
def test_what_is_no_yaml_is_refused_where_a_key_is_not_text(text: str, expected: str):
    with pytest.raises(UserError) as caught:
        Override(key=("a",), text=text).value(int)
    assert str(caught.value).startswith(expected)
    assert max(map(len, str(caught.value).splitlines())) < 400


# -- applying ------------------------------------------------------------------------------------------------------


def test_later_overrides_win_and_the_tree_stays_as_it_was():
    tree = Tree(values={"a": {"b": 1, "c": 2}}, places={("a",): "f:1", ("a", "b"): "f:2", ("a", "c"): "f:3"})
    result = apply_overrides(tree, parse_overrides(["--a.b=5", "--a.b=6", "--d.e", "7"]), None)
    assert result.values == {"a": {"b": 6, "c": 2}, "d": {"e": 7}}
    assert (result.places["a", "b"], result.places["a", "c"]) == ("--a.b", "f:3")
    assert tree.values == {"a": {"b": 1, "c": 2}}


@given(pairs=st.lists(st.tuples(st.lists(st.sampled_from("xyz"), min_size=1, max_size=3), st.integers()), max_size=5))
def test_the_last_override_of_each_key_is_what_counts(pairs):
    overrides = [Override(key=tuple(key), text=str(value)) for key, value in pairs]
    values = apply_overrides(Tree(values={}), overrides, None).values
    if overrides:
        node = values
        for part in overrides[-1].key:
            node = node[part]
        assert node == int(overrides[-1].text)


def test_a_task_kind_comes_first_wherever_it_stands():
    before = load_config("sort-grpo", parse_overrides(["--task.kind=add", "--task.num_digits=3"]))
    after = load_config("sort-grpo", parse_overrides(["--task.num_digits=3", "--task.kind=add"]))
    assert before == after
    assert before.model_dump()["task"] == {"kind": "add", "num_held_out": 500, "num_digits": 3}


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ("--rollout.temprature=1", "--rollout.temprature is not a key; did you mean --rollout.temperature?"),
        ("--temperature=1", "--temperature is not a key; did you mean --rollout.temperature or --evaluation.temp"),
        ("--rollout.temperature=hot", "--rollout.temperature='hot'; allowed: a number"),
        ("--rollout.temperature.x=3", "--rollout.temperature={'x': 3}; allowed: a number"),
        ("--rollout.temperature=0", "--rollout.temperature=0; allowed: more than 0"),
        ("--rollout.top_k=-1", "--rollout.top_k=-1; allowed: 0 or more"),
        ("--rollout.stop=['']", "--rollout.stop.0=''; allowed: "),
        ("--rollout.stop=[3]", "--rollout.stop.0=3; allowed: text"),
        ("--plan.devices.actor=x", "--plan.devices.actor='x'; allowed: a list, [a, b]"),
        ("--plan.granularity.rollout=-1", "--plan.granularity.rollout=-1; allowed: 0 or more"),
        ("--task=null", "--task is not set; give --task VALUE, or write it in a recipe"),
        ("--task={}", "--task.kind is not set; give --task.kind VALUE, or write it in a recipe"),
        ("--extends=add-grpo", "--extends is not a key; "),
        ("--name=run #3", "--name='run #3'; allowed: letters, digits, '.', '_' and '-', a letter or digit first"),
        ("--seed=99999999999999999999999", "--seed=99999999999999999999999; allowed: 8388607 or less"),
    ],
)
def test_a_wrong_override_is_named_by_its_flag(argument: str, expected: str):
    assert message(argument).startswith(expected)


def test_stop_strings_are_a_list_or_one_and_evaluation_has_those_of_training():
    one = load_config("sort-grpo", parse_overrides(["--rollout.stop=</answer>", "--evaluation.stop=[]"]))
    two = load_config("sort-grpo", parse_overrides(["--rollout.stop=[a, b]"]))
    assert isinstance(one, ReasoningConfig) and isinstance(two, ReasoningConfig)
    assert (one.rollout.stop, one.evaluation.stop) == (("</answer>",), ())
    assert (two.rollout.stop, two.evaluation.stop) == (("a", "b"), None)


def test_options_of_another_kind_of_environment_fall_away():
    own = load_config("pushcube-ppo")
    config = load_config("pushcube-ppo", parse_overrides(["--env.kind=gymnasium", "--env.id=CartPole-v1"]))
    assert isinstance(config, EmbodiedConfig) and isinstance(own, EmbodiedConfig)
    assert (config.env.options, config.env.ignore_terminations, config.env.num_envs) == ({}, False, 8)
    conventions = [(c.env.eval_ignore_terminations, c.algorithm.bootstrap_at_termination) for c in (own, config)]
    assert conventions == [(True, True), (False, False)]
    assert config.algorithm.gamma == own.algorithm.gamma == 0.95
    flags = ["--algorithm.bootstrap_at_termination=true", "--env.kind=gymnasium", "--env.id=CartPole-v1"]
    again = load_config("pushcube-ppo", parse_overrides(flags))
    assert isinstance(again, EmbodiedConfig) and again.algorithm.bootstrap_at_termination


@pytest.mark.parametrize("ours", sorted(set(FOREIGN.values())))
def test_what_other_frameworks_names_stand_for_are_keys(ours: str):
    kinds = {"job": "reasoning", "task": {"kind": "files"}, "reward": {"kind": "function"}}
    robots = {"job": "embodied"}
    assert any(annotation_at(Shipped, tuple(ours.split(".")), values) is not None for values in (kinds, robots))
