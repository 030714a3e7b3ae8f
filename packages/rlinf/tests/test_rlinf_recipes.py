"""The shipped recipes, and the schema that editors check recipes against."""

import importlib.resources
import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from rlinf.config.catalog import read_recipe, shipped_recipes
from rlinf.config.load import load_config, load_for_resume, to_yaml
from rlinf.config.overrides import parse_overrides
from rlinf.config.schema import SHIPPED, json_schema
from rlinf.errors import UserError

GSM8K = ["--model.path=some/deep/model", "--task.train_files=[train.jsonl]", "--task.eval_files=[test.jsonl]"]
RECIPES = sorted(shipped_recipes())


def load(name: str) -> Any:
    return load_config(name, parse_overrides(NEEDED.get(name, [])))


def text_of(name: str) -> str:
    return importlib.resources.files("rlinf.recipes").joinpath(f"{name}.yaml").read_text(encoding="utf-8")


EXAMPLES = [*GSM8K[:2], "--task.eval_files=[]"]
NEEDED = {name: GSM8K for name in RECIPES if "train_files" in text_of(name)} | dict.fromkeys(
    ("sft", "dpo", "reward-model"), EXAMPLES
)
"""Recipe -> what a user has to bring."""


def test_these_recipes_are_shipped():
    assert RECIPES == [
        "add-grpo",
        "chart-read-grpo",
        "code-loop",
        "count-shapes-grpo",
        "dpo",
        "env-ppo",
        "faucet-dagger",
        "faucet-pi0-dsrl",
        "faucet-rlpd",
        "geo3k-grpo-vl",
        "grid-text",
        "gsm8k-grpo",
        "gsm8k-grpo-fsdp2",
        "gsm8k-grpo-lora",
        "gsm8k-grpo-megatron",
        "gsm8k-grpo-sglang",
        "guess-team",
        "gui-click-grpo",
        "libero-oft-grpo",
        "libero-pi0-ppo",
        "libero-pi05-ppo",
        "libero-smolvla-ppo",
        "maniskill-openvla-ppo",
        "math-grpo-1.5b",
        "math-grpo-1.5b-128k",
        "math-grpo-7b",
        "math-grpo-qwen3-30b-a3b",
        "mini-swe-grpo",
        "pendulum-sac",
        "pushcube-ppo",
        "qwen3-moe-grpo-megatron",
        "reach-oft-grpo",
        "reach-openvla-ppo",
        "reach-pi0-ppo",
        "reach-smolvla-ppo",
        "retool-grpo",
        "reward-model",
        "search-hop",
        "search-r1-grpo",
        "search-r1-ppo",
        "sft",
        "sort-grpo",
        "sort-grpo-megatron-sglang",
        "tool-calculator",
    ]


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_loads_and_says_what_it_is(name: str):
    assert load(name).name == name
    first = text_of(name).splitlines()[0]
    assert first == f"# {shipped_recipes()[name]}"
    assert first.endswith(".")


@pytest.mark.parametrize("name", RECIPES)
def test_a_resolved_recipe_is_a_recipe(name: str, tmp_path: Path):
    config = load(name)
    (tmp_path / "config.yaml").write_text(to_yaml(config), encoding="utf-8")
    assert load_for_resume(tmp_path) == config
    assert load_config(str(tmp_path / "config.yaml")) == config
    assert to_yaml(load_config(str(tmp_path / "config.yaml"))) == to_yaml(config)


def test_gsm8k_says_which_overrides_to_give():
    with pytest.raises(UserError) as caught:
        load_config("gsm8k-grpo")
    text = str(caught.value)
    for needed in ("--task.train_files", "--model.path"):
        assert f"give {needed} " in text
    assert len(text.splitlines()) == 3


def test_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.chdir(tmp_path)
    values = load("gsm8k-grpo").model_dump()
    assert values["model"]["path"] == tmp_path / "some" / "deep" / "model"
    assert values["task"]["train_files"] == (tmp_path / "train.jsonl",)


def test_add_differs_from_sort_in_name_and_task_alone():
    add, sort = load("add-grpo").model_dump(), load("sort-grpo").model_dump()
    assert {key for key in sort if sort[key] != add[key]} == {"name", "task"}


@pytest.mark.parametrize(
    ("name", "convention"),
    [
        ("libero-oft-grpo", {"gripper": "open_is_minus_one", "center_crop": True, "head": "tokens"}),
        ("maniskill-openvla-ppo", {"gripper": "open_is_one"}),
        ("libero-pi0-ppo", {"relative_to_state": True, "dataset": "physical-intelligence/libero"}),
        ("libero-pi05-ppo", {"state_in_prompt": False, "dataset": "physical-intelligence/libero"}),
        ("libero-smolvla-ppo", {"relative_to_state": False, "dataset": None, "num_denoising_steps": 10}),
    ],
)
def test_published_checkpoints_act_as_they_were_trained(name: str, convention: dict[str, object]):
    """The simulator's gripper; openpi's `pi0_libero` and `pi05_libero`; RLinf's configuration of OpenVLA-OFT; LeRobot's
    configuration of SmolVLA, whose files hold one set of statistics and differences."""
    options = load(name).model_dump()["policy"]["options"]
    assert {key: options.get(key) for key in convention} == convention


PI_PPO = {
    "algorithm.value_clip": 0.2,
    "algorithm.value_coef": 1.0,
    "algorithm.bootstrap_at_truncation": False,
    "algorithm.episode_aggregation": "episode_mean",
    "actor.learning_rate": 5e-6,
    "actor.value_learning_rate": 1e-4,
    "actor.weight_decay": 0.01,
}


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("libero-pi0-ppo", PI_PPO | {"algorithm.num_epochs": 4}),
        ("libero-pi05-ppo", PI_PPO | {"algorithm.num_epochs": 1}),
        ("libero-smolvla-ppo", PI_PPO | {"algorithm.num_epochs": 4}),
        (
            "libero-oft-grpo",
            {"algorithm.episode_aggregation": "episode_mean", "env.ignore_terminations": False, "actor.lora": None},
        ),
        (
            "maniskill-openvla-ppo",
            {
                "actor.lora.rank": 32,
                "actor.lora.alpha": 32.0,
                "actor.learning_rate": 1e-4,
                "actor.value_learning_rate": 3e-3,
                "env.options.reward_mode": "stages",
            },
        ),
    ],
)
def test_recipes_of_published_checkpoints_train_as_the_public_configurations(name: str, public: dict[str, object]):
    """RLinf's, of the same models, and for SmolVLA of pi0; the training data were drawn at 256 pixels and in full
    quality."""
    public = public | {"actor.adam_epsilon": 1e-8, "algorithm.target_kl": None, "env.options.quality": "full"}
    if name.startswith("libero"):
        public = public | {"env.options.image_size": 256, "env.episodes_per_step": 512}
    config = load(name).model_dump()
    assert {key: at(config, key) for key in public} == public


def test_the_page_of_openvla_trains_in_libero_as_the_public_configurations(tmp_path: Path):
    page = (Path(__file__).parents[3] / "docs" / "policies" / "openvla.md").read_text(encoding="utf-8")
    _, _, rest = page.partition('title="libero-openvla.yaml"\n')
    (tmp_path / "libero-openvla.yaml").write_text(rest.partition("```")[0])
    config = load_config(str(tmp_path / "libero-openvla.yaml")).model_dump()
    public = {
        "actor.adam_epsilon": 1e-8,
        "algorithm.target_kl": None,
        "algorithm.entropy_coef": 0.0,
        "algorithm.num_epochs": 1,
        "algorithm.value_clip": 0.2,
        "env.options.quality": "full",
        "env.options.image_size": 256,
    }
    assert {key: at(config, key) for key in public} == public


def at(values: dict, key: str) -> object:
    for part in key.split("."):
        values = values[part]
    return values


# -- the schema ----------------------------------------------------------------------------------------------------


def accepts(schema: dict, node: dict, value: object) -> bool:
    """A small validator for the part of JSON schema that pydantic writes; independent of pydantic."""
    if "$ref" in node:
        return accepts(schema, schema["$defs"][node["$ref"].removeprefix("#/$defs/")], value)
    if "anyOf" in node:
        return any(accepts(schema, option, value) for option in node["anyOf"])
    if "const" in node or "enum" in node:
        return value in node.get("enum", [node.get("const")])
    if "type" not in node:
        return True
    if node["type"] == "object":
        properties, rest = node.get("properties", {}), node.get("additionalProperties", True)
        return isinstance(value, dict) and all(
            accepts(schema, properties[key], entry)
            if key in properties
            else bool(rest) and (rest is True or accepts(schema, rest, entry))
            for key, entry in value.items()
        )
    if node["type"] == "array":
        items, first = node.get("items", {}), node.get("prefixItems", [])
        return isinstance(value, list) and all(
            accepts(schema, first[i] if i < len(first) else items, entry) for i, entry in enumerate(value)
        )
    if node["type"] in ("integer", "number") and isinstance(value, bool):
        return False
    kinds = {"string": str, "integer": int, "number": (int, float), "boolean": bool, "null": type(None)}
    return isinstance(value, kinds[node["type"]])


@pytest.mark.parametrize("name", RECIPES)
def test_the_schema_accepts_every_recipe(name: str):
    schema = json_schema()
    values = read_recipe(name).values if name not in NEEDED else json.loads(load(name).model_dump_json())
    assert accepts(schema, schema, values)
    assert accepts(schema, schema, {"extends": "sort-grpo", "seed": 3})
    assert accepts(schema, schema, json.loads(load(name).model_dump_json()))


@pytest.mark.parametrize("path", ["seed", "rollout.temperature", "run.num_steps", "task.num_digits", "actor.betas"])
def test_the_schema_refuses_wrong_types_and_unknown_keys(path: str):
    schema = json_schema()
    *parents, name = path.split(".")
    for key, value in ((name, {"x": 1}), (f"{name}_", 3)):
        values = read_recipe("sort-grpo").values
        section = values
        for parent in parents:
            section = section[parent]
        section[key] = value
        assert not accepts(schema, schema, values)


def test_the_schema_is_json_and_describes_every_key():
    schema = json.loads(json.dumps(json_schema()))
    assert schema["$schema"] == "https://json-schema.org/draft/2020-12/schema"
    undescribed = [
        f"{name}.{key}"
        for name, section in schema["$defs"].items()
        for key, field in section["properties"].items()
        if key != "kind" and "description" not in {**schema["$defs"].get(field.get("$ref", "")[8:], {}), **field}
    ]
    assert undescribed == []


def test_no_default_of_the_config_is_shared_and_mutable():
    sections = [field.default for model in SHIPPED for field in model.model_fields.values()]
    assert all(section.model_config.get("frozen") for section in sections if isinstance(section, BaseModel))
