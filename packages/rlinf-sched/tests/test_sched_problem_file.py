"""Problem files: what may be written, what is refused and how, the schema, and mutations."""

import copy
import json
import math
import random
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlinf_sched import Cluster, Links, Problem, ProblemError, SchedError, TimePoint
from rlinf_sched.explain import explain_problem, explanation_text, trace_json
from rlinf_sched.problem_file import problem_of_tree, read_problem
from rlinf_sched.problem_schema import problem_json_schema

pytestmark = pytest.mark.usefixtures("brief_search")

EXAMPLES = Path(__file__).parents[1] / "examples"
NUM_MUTATIONS = 2_000


def tree_of(name: str) -> dict[str, Any]:
    if name.endswith(".json"):
        return json.loads((EXAMPLES / name).read_text())
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((EXAMPLES / name).read_text())


def names() -> list[str]:
    return sorted(path.name for path in EXAMPLES.iterdir() if path.suffix in (".json", ".yaml"))


@pytest.fixture
def tree() -> dict[str, Any]:
    return tree_of("laptop.json")


def at(tree: Any, *path: str | int) -> Any:
    for key in path:
        tree = tree[key]
    return tree


# -- reading -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names())
def test_examples_are_valid_and_their_full_form_reads_back_equal(name: str, tmp_path: Path):
    problem = read_problem(EXAMPLES / name)
    (tmp_path / "full.json").write_text(problem.to_json())
    assert read_problem(tmp_path / "full.json") == problem == Problem.from_json(problem.to_json())


def test_shorthands_mean_what_the_full_form_says():
    pytest.importorskip("yaml")
    problem = read_problem(EXAMPLES / "grpo-7b.yaml")
    assert problem.cluster == Cluster.cuda_nodes(8, 8, name="NVIDIA H100", memory_bytes=80 * 2**30)
    rollout = problem.profile("rollout")
    assert rollout.weights_bytes == 15_200_000_000
    assert rollout.instances[0].item_work_bytes == 2**30
    assert rollout.instances[0].points[1] == TimePoint(num_items=8, seconds=52.0)
    assert problem.flow.item_bytes["samples"] == 1_000_000
    embodied = read_problem(EXAMPLES / "embodied-cycle.yaml")
    assert embodied.cluster.links == Links(node_bytes_per_s=450e9, host_bytes_per_s=50e9)


def test_cpu_slots_without_memory_share_that_of_this_machine(tree: dict):
    del tree["cluster"]["memory_gib"]
    assert problem_of_tree(tree).cluster == Cluster.cpu_slots(2)


def test_yaml_numbers_in_scientific_notation_are_numbers(tmp_path: Path, tree: dict):
    yaml = pytest.importorskip("yaml")
    tree["cluster"]["links"] = {"latency_s": 12345}
    (tmp_path / "p.yaml").write_text(yaml.dump(tree).replace("12345", "2e-5"))
    assert read_problem(tmp_path / "p.yaml").cluster.links.latency_s == 2e-5


def test_yaml_without_pyyaml_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "p.yaml").write_text("format: 1\n")
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(ProblemError, match="needs PyYAML; install it"):
        read_problem(tmp_path / "p.yaml")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("p.json", '{"format": 1, "flow": {}, "flow": {}}', "the key 'flow' occurs twice"),
        ("p.json", "{", "not valid JSON: Expecting property name enclosed in double quotes at line 1, column 2"),
        ("p.json", "[" * 100_000, "nested too deep"),
        ("p.json", '{"format": 1' + "0" * 5000 + "}", "not valid JSON: Exceeds the limit"),
        ("p.json", "[]", "problem is a list; expected an object with the keys of a problem"),
        ("p.json", b"\xff", "not UTF-8 text: invalid start byte at byte 0"),
        ("p.yaml", "", "the file is empty; a problem has the keys flow"),
        (
            "p.yaml",
            "a: [",
            "not valid YAML: while parsing a flow node, expected the node content, but found '<stream end>' at line 1",
        ),
        ("p.yaml", "a: 1\nb: 2\na: 3", "line 3: the key 'a' is already on line 1"),
        ("p.yaml", "&a [*a]", "line 1: nested too deep; does it refer to itself?"),
        ("p.yaml", "num_items: " + ":".join(["59"] * 20_000), "line 1: '59:59:59"),
        ("p.yaml", "num_items: 0x" + "f" * 100_000, "line 1: '0xfff"),
        ("p.yaml", "num_items: !!bool word", "not valid YAML: KeyError('word')"),
        ("p.yaml", "? [1, 2]\n: 3", "line 1: a key must be text"),
        ("p.yaml", "a: !!python/object:os.system {}", "could not determine a constructor"),
        ("p.yaml", "a: 1\n--- \nb: 2", "expected a single document"),
        ("p.yaml", "1: 2\nformat: 1", "problem.1 is not a known key; allowed: flow, profiles"),
        ("p.toml", "", "the name of a problem file ends in .json, .yaml or .yml"),
        ("p.json", None, "No such file or directory"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_what_is_wrong(name: str, text: Any, expected: str, tmp_path: Path):
    if name.endswith("yaml"):
        pytest.importorskip("yaml")
    path = tmp_path / name
    if text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(SchedError) as e:
        read_problem(path)
    assert str(e.value).startswith(f"{path}: ")
    assert expected in str(e.value)


def test_the_documentation_is_right(tmp_path: Path):
    pytest.importorskip("yaml")
    text = (Path(__file__).parents[3] / "docs" / "problem-file.md").read_text()
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    clusters = [block for block in blocks if block.startswith("cluster:")]
    rest = "".join(["format: 1\nnum_items: 64\n", *(block for block in blocks if block not in clusters)])
    path = tmp_path / "problem.yaml"
    assert len(clusters) == 3
    for cluster in clusters:
        path.write_text(rest + cluster)
        read_problem(path)
    path.write_text(rest.replace("item_multiple", "item_multipel") + clusters[0])
    with pytest.raises(SchedError) as e:
        read_problem(path)
    assert f"error: {e.value}".replace(f"{tmp_path}/", "") in text


# -- what is refused -----------------------------------------------------------------------------------------------


def stage(tree: dict, i: int) -> dict:
    return at(tree, "flow", "stages", i)


def instance(tree: dict, name: str) -> dict:
    return at(tree, "profiles", "stages", name, "instances", 0)


def links(tree: dict, **values: float) -> None:
    tree["cluster"].setdefault("links", {}).update(values)


def costs(tree: dict, **values: Any) -> None:
    tree["profiles"]["stages"]["rollout"].setdefault("costs", {}).update(values)


def make_cycle(tree: dict) -> None:
    tree["flow"]["feeds"] = []
    stage(tree, 0).update(reads=["replies"], writes=["samples", "calls"])
    tree["flow"]["stages"].append(
        {"name": "tool", "worker": "tool", "role": "tool", "reads": ["calls"], "writes": ["replies"]}
    )
    tree["profiles"]["stages"]["tool"] = copy.deepcopy(tree["profiles"]["stages"]["rollout"])


BAD_INPUT: list[tuple[Callable[[dict], Any], str]] = [
    (make_cycle, "flow.feeds: the cycle rollout <-> tool has no initial item"),
    (lambda t: t["profiles"]["stages"].pop("actor"), "profiles.stages.actor is missing"),
    (
        lambda t: t["profiles"]["stages"].update(rolout=t["profiles"]["stages"].pop("rollout")),
        "profiles.stages.rollout is missing; did you mean 'rolout'?",
    ),
    (lambda t: instance(t, "actor").update(points=[[1, 0]]), "instances[0].points[0].seconds=0.0 must be positive"),
    (
        lambda t: instance(t, "actor").update(points=[[1, 1e308], [2, 1.7e308]]),
        "points[0].seconds=1e+308 must be positive and at most 1e+12",
    ),
    (
        lambda t: instance(t, "actor").update(step_s=1e13),
        "instances[0].step_s=10000000000000.0 must be from 0 to 1e+12",
    ),
    (lambda t: instance(t, "actor").update(onload_s=-1), "instances[0].onload_s=-1.0 must be from 0 to 1e+12"),
    (lambda t: instance(t, "rollout").update(state_bytes="-15GB"), "state_bytes='-15GB' must not be negative"),
    (lambda t: instance(t, "actor").update(points=[[1, -2.5]]), "points[0].seconds=-2.5 must be positive"),
    (lambda t: instance(t, "actor").update(points=[[1, math.nan]]), "points[0].seconds=nan is not a finite number"),
    (lambda t: instance(t, "actor").update(points=[[1, "1 s"]]), "seconds='1 s' is a string; expected a number"),
    (
        lambda t: instance(t, "actor").update(step_s=-1),
        "profiles.stages.actor.instances[0].step_s=-1.0 must be from 0 to",
    ),
    (lambda t: t.update(pinned_devices={"rollout": 3}), "pinned_devices.rollout=3: the cluster has 2 devices"),
    (
        lambda t: t.update(pinned_devices={"rolout": 1}),
        "pinned_devices.rolout: there is no such worker group; did you mean 'rollout'?",
    ),
    (lambda t: t["flow"]["stages"][1].update(granularities=[-1]), "granularities: -1 is no multiple of item_multiple"),
    (lambda t: t.update(num_item=3), "problem.num_item is not a known key; did you mean 'num_items'?"),
    (lambda t: t.pop("num_items"), "problem.num_items is missing; add it"),
    (lambda t: t.update(num_items=0), "num_items=0 must be from 1 to"),
    (lambda t: t.update(num_items=10**15), "num_items=1000000000000000 must be from 1 to"),
    (lambda t: t.update(num_items=10**30), "problem.num_items is an integer beyond 2**63"),
    (lambda t: t.update(num_items=10**5000), "problem.num_items is an integer beyond 2**63"),
    (lambda t: t.update(format=2), "problem.format=2: this version of rlinf-sched reads format 1"),
    (lambda t: t["cluster"].update(cpu_slots=0), "problem.cluster.cpu_slots=0 must be from 1 to 1,000,000"),
    (lambda t: t["cluster"].update(memory_gib=-4), "problem.cluster.memory_gib=-4.0 must be positive"),
    (lambda t: t["cluster"].update(memory=4), "problem.cluster.memory is not a known key; did you mean 'memory_gib'?"),
    (
        lambda t: t.update(cluster={"nodes": 10**5, "devices_per_node": 10**5, "name": "x", "memory_gib": 1}),
        "problem.cluster.nodes * devices_per_node=10000000000 must be from 1 to",
    ),
    (lambda t: t.update(cluster={}), "problem.cluster.devices_per_node is missing"),
    (
        lambda t: instance(t, "rollout").update(state_bytes="2 gigs"),
        "state_bytes='2 gigs': unknown unit; allowed: B, k",
    ),
    (lambda t: instance(t, "rollout").update(state_bytes="2Gib"), "unknown unit; did you mean 'GiB'?"),
    (lambda t: instance(t, "rollout").update(state_bytes="much"), "state_bytes='much' is no size; write a number"),
    (lambda t: instance(t, "rollout").update(state_bytes="9999999PB"), "is beyond 2**63 bytes"),
    (lambda t: t["profiles"]["stages"]["actor"].update(rounds=2), "rounds=2, but the stage is in no cycle; use 1"),
    (lambda t: links(t, node_bytes_per_s=0), "cluster.links.node_bytes_per_s=0.0 must be positive"),
    (lambda t: links(t, sync_bytes_per_s=0), "cluster.links.sync_bytes_per_s=0.0 must be positive"),
    (lambda t: links(t, latency_s=-1), "cluster.links.latency_s=-1.0 must not be negative"),
    (lambda t: stage(t, 0).update(num_parts=-1), "stage 'rollout': num_parts=-1 must not be negative"),
    (lambda t: stage(t, 0).update(devices_per_rank=-1), "stage 'rollout': devices_per_rank=-1 must not be negative"),
    (lambda t: t["flow"]["weight_edges"][0].update(kept_bytes=-1), "kept_bytes=-1 must not be negative"),
    (lambda t: costs(t, spread="samples"), "costs.samples is empty; give measured costs or use another spread"),
    (lambda t: costs(t, spread="samples", samples=[1, 0]), "costs.samples must be positive; found 0"),
    (lambda t: costs(t, longest=0.5), "costs.longest=0.5 must be at least 1, the mean"),
]


@pytest.mark.parametrize(("change", "expected"), BAD_INPUT)
def test_bad_input_is_refused_with_its_key(change: Callable[[dict], Any], expected: str, tree: dict):
    problem_of_tree(tree)
    change(tree)
    with pytest.raises(SchedError) as e:
        problem_of_tree(tree)
    assert expected in str(e.value)


def test_a_cycle_may_begin_with_what_comes_from_outside_or_with_an_environment(tree: dict):
    make_cycle(tree)
    with_env = copy.deepcopy(tree)
    stage(with_env, 2)["role"] = "env"
    problem_of_tree(with_env)
    tree["flow"]["feeds"] = ["calls"]
    problem_of_tree(tree)


def test_the_stages_of_a_cycle_have_the_same_rounds():
    tree = tree_of("embodied-cycle.yaml")
    tree["profiles"]["stages"]["policy"]["rounds"] = 79
    with pytest.raises(
        ProblemError, match=r"env.rounds=80, policy.rounds=79, but the stages of the cycle env <-> policy"
    ):
        problem_of_tree(tree)


def test_a_cycle_that_goes_round_too_often_is_refused():
    tree = tree_of("embodied-cycle.yaml")
    for name in ("env", "policy"):
        tree["profiles"]["stages"][name]["rounds"] = 10**6
    with pytest.raises(ProblemError, match=r"profiles.stages.env.rounds=1000000 must be at most 39,062"):
        problem_of_tree(tree)


# -- schema --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", names())
def test_the_schema_accepts_the_examples(name: str):
    jsonschema = pytest.importorskip("jsonschema")
    schema = problem_json_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.validate(tree_of(name), schema)
    jsonschema.validate(json.loads(read_problem(EXAMPLES / name).to_json()), schema)


@pytest.mark.parametrize(
    "cluster",
    [
        {"cpu_slots": 2, "memory_gib": 1, "cpu_cores": 3},
        {"nodes": 2, "devices_per_node": 1, "name": "gpu", "memory_gib": 1, "cpu_cores": 3},
    ],
)
def test_every_form_of_a_cluster_takes_the_cores_of_a_node(cluster):
    tree = tree_of("laptop.json")
    assert problem_of_tree({**tree, "cluster": cluster}).cluster.cpu_cores == 3
    with pytest.raises(SchedError, match=r"cpu_cores=-1 must be from 0"):
        problem_of_tree({**tree, "cluster": {**cluster, "cpu_cores": -1}})


def test_the_published_schema_is_that_of_the_records():
    published = Path(__file__).parents[1] / "problem.schema.json"
    assert json.loads(published.read_text()) == problem_json_schema(), "rlinf plan --schema > packages/rlinf-sched/" + (
        published.name
    )


def test_the_schema_knows_every_key_with_its_text():
    schema = problem_json_schema()
    points = schema["$defs"]["InstanceProfile"]["properties"]["points"]
    assert "Ascending in items" in points["description"]
    assert schema["$defs"]["StageProfile"]["properties"]["batching"]["enum"] == ["sum", "longest", "continuous"]
    assert schema["required"] == ["format", "flow", "profiles", "cluster", "num_items"]


# -- mutations -----------------------------------------------------------------------------------------------------

ODD_VALUES = [None, True, "", "x", "80GiB", [], {}, [[]], 0, -1, 2.5, 1e308, math.nan, math.inf, 10**30, -(10**30)]


def places(value: Any, path: tuple = ()) -> list[tuple]:
    """The path of everything in the tree but its root."""
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [place for key, child in children for place in [(*path, key), *places(child, (*path, key))]]


def mutate(tree: dict, rng: random.Random) -> dict:
    tree = copy.deepcopy(tree)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        paths = places(tree)
        if not paths:
            break
        *parents, key = rng.choice(paths)
        parent = at(tree, *parents)
        value, kind = parent[key], rng.choice(("drop", "rename", "retype", "negate", "scale", "swap", "copy"))
        if kind == "drop":
            del parent[key]
        elif kind == "rename" and isinstance(parent, dict):
            parent[rng.choice((f"{key}s", str(key)[1:], 7, "", key[::-1]))] = parent.pop(key)
        elif kind == "negate" and isinstance(value, (int, float)):
            parent[key] = -value
        elif kind == "scale" and isinstance(value, (int, float)):
            parent[key] = value * rng.choice((0, 1e-300, 0.5, 1e6, 10**18, 1e300))
        elif kind == "swap" and not isinstance(value, (dict, list)):
            *others, other = rng.choice(paths)
            parent[key], at(tree, *others)[other] = copy.deepcopy(at(tree, *others)[other]), value
        elif kind == "copy" and isinstance(parent, list):
            parent.append(copy.deepcopy(value))
        else:
            parent[key] = copy.deepcopy(rng.choice(ODD_VALUES))
    return tree


def test_mutated_problems_give_no_traceback_and_name_a_key():
    trees = [tree_of(name) for name in names()]
    schema = problem_json_schema()
    sections = [schema, *schema["$defs"].values()]
    keys = {key for section in sections for key in section["properties"]}
    rng = random.Random(20)
    refusals = [text for _ in range(NUM_MUTATIONS) if (text := refusal(mutate(rng.choice(trees), rng))) is not None]
    assert [text for text in refusals if not keys & set(re.findall(r"[a-z_]+", text))] == []
    assert len(refusals) > NUM_MUTATIONS // 2


def refusal(tree: dict) -> str | None:
    try:
        assert problem_of_tree(tree).num_items >= 1
    except SchedError as e:
        return str(e)
    return None


MAX_PLANNED_ITEMS = 20_000
"""Most items of a stage in a step, its rounds included: more items would only take longer."""


def test_a_sample_of_mutated_problems_is_explained_or_refused():
    trees = [tree_of(name) for name in names()]
    rng = random.Random(21)
    outcomes = [outcome for _ in range(200) if (outcome := explained(mutate(rng.choice(trees), rng))) is not None]
    assert outcomes.count("") > 3
    assert all(text == text.strip() for text in outcomes)


def explained(tree: dict) -> str | None:
    """Empty if the problem has a plan that can be told, the message if it has none, None if it is not worth asking."""
    try:
        problem = problem_of_tree(tree)
    except SchedError:
        return None
    most_rounds = max(profile.rounds for profile in problem.profiles.stages.values())
    if problem.num_items * most_rounds > MAX_PLANNED_ITEMS:
        return None
    try:
        explanation = explain_problem(problem)
    except SchedError as e:
        return str(e)
    assert explanation_text(explanation) and json.loads(explanation.to_json())
    assert trace_json(explanation.spans, explanation.plan, problem.flow)
    return ""
