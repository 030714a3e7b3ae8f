"""The reference pages of the site: every key has a meaning, a type and a page, every public name a docstring."""

import fnmatch
import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, Field

from rlinf.config.catalog import read_recipe, shipped_recipes
from rlinf.config.evaluation import EvalConfig
from rlinf.config.messages import all_keys, dotted
from rlinf.config.playing import TrainedConfig
from rlinf.config.reference import KeyEntry, option_entries, sections
from rlinf.config.schema import SHIPPED
from rlinf.config.suites import SuiteConfig
from rlinf.config.yaml_source import parse_file
from rlinf_workers.plugins import ENGINES, LAUNCHERS, POLICIES, TRAINERS, WEIGHT_SYNCS

REPOSITORY = Path(__file__).parents[3]
MODELS = (*SHIPPED, EvalConfig, TrainedConfig, SuiteConfig)


@pytest.fixture
def site(monkeypatch: pytest.MonkeyPatch):
    """Imports a module of tools/site, which is not a package."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "tools" / "site"))
    before = set(sys.modules)
    yield importlib.import_module
    for name in set(sys.modules) - before:
        if Path(getattr(sys.modules[name], "__file__", None) or "").parent == REPOSITORY / "tools" / "site":
            del sys.modules[name]


class Shape(BaseModel):
    """A shape."""

    kind: Literal["round"]
    radius: float = Field(gt=0, description="Metres.")


class Box(BaseModel):
    """A box.

    More about it.
    """

    kind: Literal["box", "cube"]
    sides: tuple[int, ...] = Field(default=(1,), description="Lengths.")


class Root(BaseModel):
    """All of it."""

    name: str | None = Field(default=None, description="A name.")
    count: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(default="auto", description="How many.")
    shape: Annotated[Shape | Box, Field(discriminator="kind")] = Field(description="What it looks like.")
    others: dict[str, Box] = Field(default={}, description="Further boxes.")
    described_by_its_class: Shape


@dataclass
class Options:
    size: int
    """Tokens at
    most."""
    mode: Literal["fast", "slow"] = "fast"


def test_sections_in_the_order_of_the_config():
    root, round_shape, box = sections(Root)
    assert (root.key, root.kinds, root.meaning) == ("", (), "All of it.")
    assert root.keys == (
        KeyEntry(key="name", type="text or null", default="null", meaning="A name."),
        KeyEntry(key="count", type='integer, at least 1, or "auto"', default='"auto"', meaning="How many."),
        KeyEntry(key="shape", type="section", default="required", meaning="What it looks like."),
        KeyEntry(key="others", type="mapping of names to section, as shape", default="{}", meaning="Further boxes."),
        KeyEntry(key="described_by_its_class", type="section, as shape", default="required", meaning="A shape."),
    )
    assert (round_shape.key, round_shape.kinds) == ("shape", ("round",))
    assert [(key.key, key.type, key.default) for key in round_shape.keys] == [
        ("shape.radius", "number, more than 0", "required")
    ]
    assert (box.kinds, box.meaning) == (("box", "cube"), "A box.")
    assert [(key.key, key.type, key.default) for key in box.keys] == [
        ("shape.kind", '"box" or "cube"', "required"),
        ("shape.sides", "list of integer", "[1]"),
    ]


def test_options_of_a_plug_in():
    assert option_entries(Options, "engine_options") == [
        KeyEntry(key="engine_options.size", type="integer", default="required", meaning="Tokens at most."),
        KeyEntry(key="engine_options.mode", type='"fast" or "slow"', default='"fast"', meaning=""),
    ]


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.__name__)
def test_every_key_and_section_has_a_meaning(model: type[BaseModel]):
    entries = sections(model)
    assert [(one.key, one.kinds) for one in entries if not one.meaning] == []
    keys = [key for one in entries for key in one.keys]
    assert [key.key for key in keys if not key.meaning] == []
    assert [key.key for key in keys if "value" in key.type.split()] == [], "every type is described"


@pytest.mark.parametrize(
    "plugins",
    [ENGINES, TRAINERS, POLICIES, LAUNCHERS, WEIGHT_SYNCS],
    ids=("engines", "trainers", "policies", "launchers", "weight_syncs"),
)
def test_every_declared_option_has_a_meaning(plugins):
    declared = [spec.options for spec in plugins.specs() if spec.options is not None]
    assert [entry.key for options in declared for entry in option_entries(options, "") if not entry.meaning] == []


def test_no_key_of_a_shipped_recipe_is_left_out():
    for model in SHIPPED:
        listed = {key.key for section in sections(model) for key in section.keys}
        everything = {
            dotted(key) for key in all_keys(model, (), {"task": {"kind": "files"}, "reward": {"kind": "math"}})
        }
        kinds = {"task.kind", "reward.kind"}
        assert everything - listed - kinds == set()


def test_every_key_names_a_page_that_is_there(site):
    pages = site("key_pages").key_pages()
    linked = {page.partition("#")[0] for text in pages.values() for page in _links(text) if page.startswith("../")}
    assert len(linked) > 20
    assert [page for page in linked if not (REPOSITORY / "docs" / page.removeprefix("../")).is_file()] == []


def test_every_heading_of_a_key_page_has_its_own_anchor(site):
    for name, text in site("key_pages").key_pages().items():
        anchors = [line.partition("{ #")[2].partition(" }")[0] for line in text.splitlines() if line.startswith("#")][
            1:
        ]
        assert len(anchors) == len(set(anchors)), name
        assert {link[1:] for link in _links(text) if link.startswith("#")} <= set(anchors), name


def test_a_key_has_its_own_name_as_anchor(site):
    text = site("key_pages").key_pages()["reference/keys-reasoning.md"]
    for key in ("reward.kind", "task.kind", "task.answer_format", "reward.path", "algorithm.clip_high"):
        assert f"`{key}` {{ #{key} }}" in text, key
    assert "- [`math`](#reward-section-math): " in text


def test_a_key_page_has_the_names_of_other_frameworks(site):
    text = site("key_pages").key_pages()["reference/keys-reasoning.md"]
    assert "in TRL, verl or OpenRLHF `num_generations`, `n`, `n_samples_per_prompt`" in text


def test_every_command_is_on_the_page_once(site):
    from rlinf.cli.main import COMMANDS

    text = site("command_page").command_page()["reference/commands.md"]
    assert [command for command in COMMANDS if text.count(f"\n## rlinf {command}\n") != 1] == []
    assert "\n### rlinf config show\n" in text
    assert "- **`--checkpoint WHICH`**: checkpoint of a run" in text


def test_a_page_of_a_recipe_has_inherited_values_with_their_comments(site):
    pages = site("recipe_pages").recipe_pages()
    page = pages["reference/recipes/gsm8k-grpo-fsdp2.md"]
    assert "It extends [gsm8k-grpo](gsm8k-grpo.md)" in page and "rlinf train gsm8k-grpo-fsdp2 --model.path" in page
    assert "  learning_rate: 1e-6\n" in page, "from gsm8k-grpo"
    assert "    compute_dtype: bfloat16 # beside float32 weights, gradients and moments\n" in page


@pytest.mark.parametrize("recipe", shipped_recipes())
def test_a_page_of_a_recipe_has_all_that_it_sets(site, recipe: str):
    page = site("recipe_pages").recipe_pages()[f"reference/recipes/{recipe}.md"]
    (yaml,) = re.findall(r"^```yaml\n(.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    assert parse_file(yaml, "page").values == read_recipe(recipe).values


def test_every_public_name_has_a_docstring(site):
    pytest.importorskip("tomllib")  # Python 3.11
    public = site("public_names")
    names = [name for module in public.public_modules() for name in public.public_names(module)]
    assert len(names) > 500
    assert [f"{name.module}.{name.name}" for name in names if not name.docstring] == []


def test_pages_that_rank_higher_or_lower_in_the_search_exist(site):
    generated = {*site("recipe_pages").recipe_pages(), *site("key_pages").key_pages(), "reference/api/rlinf.md"}
    generated.add("files/README.md")
    pages = {page.relative_to(REPOSITORY / "docs").as_posix() for page in (REPOSITORY / "docs").rglob("*.md")}
    boosts = site("search_boosts")
    assert [name for name in boosts.BOOSTS if not fnmatch.filter(pages | generated, name)] == []
    order = ("how-do-i.md", "checkpoints.md", "index.md", "decisions/001-turns-hold-leases.md")
    values = [boosts.search_boost(page) for page in order]
    assert values == sorted(values, reverse=True) and len(set(values)) == 4


def test_warnings_about_dead_links_reach_the_strict_build():
    """mkdocs drops warnings before --strict counts them if it has --quiet."""
    (command,) = re.findall(r"mkdocs build.*", (REPOSITORY / "tools" / "site.sh").read_text(encoding="utf-8"))
    assert "--strict" in command and "--quiet" not in command and " -q" not in command


def test_the_search_finds_keys_and_names_by_their_parts():
    (pattern,) = re.findall(r"separator: '(.*)' #", (REPOSITORY / "mkdocs.yml").read_text(encoding="utf-8"))
    assert re.split(pattern, "algorithm.clip_high, W&amp;B (rollout/entropy)") == [
        *("algorithm", "clip_high", "W", "B", "rollout", "entropy", "")
    ]


def _links(text: str) -> list[str]:
    return [part.partition(")")[0] for part in text.split("](")[1:]]


def test_sections_without_text_are_left_out_of_the_search(site):
    empty = '<h2 id="a">A <a href="#a">#</a></h2>\n'
    rest = '<h3 id="b">B</h3><p>text</p>\n<h2 id="c">C</h2><p>text</p><h3 id="d">D</h3>'
    page = site("search_boosts").without_empty_sections(empty + rest)
    assert page == empty.replace("<h2", '<h2 data-search-exclude="true"') + rest
