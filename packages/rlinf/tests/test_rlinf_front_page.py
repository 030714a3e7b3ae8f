"""What the README of the repository names exists, its figures are those of the files that it links, and the commands of
all pages are accepted."""

import json
import re
import shlex
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml
from benchmarks.targets import RatioTarget

from rlinf.cli.main import main, make_parser
from rlinf.config.catalog import read_recipe, shipped_recipes
from rlinf.config.comparison import CompareConfig
from rlinf.config.explain_key import explain_key
from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides, split_overrides
from rlinf.config.schema import SHIPPED
from rlinf.config.suites import SuiteEvalConfig
from rlinf.errors import UserError
from rlinf_algos import preset
from rlinf_algos.presets import EPISODE_PRESETS, PRESETS

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
INDEX = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
HOW_DO_I = ROOT / "docs" / "how-do-i.md"
NEEDED = ["--model.path=DIR", "--task.train_files=[a.jsonl]", "--task.eval_files=[b.jsonl]"]


def table(first_column: str) -> list[list[str]]:
    """The cells of the README's table whose header begins with this column."""
    (text,) = re.findall(rf"^\| {first_column} \|.*\n\|[-|]+\n((?:\|.*\n)+)", README, flags=re.MULTILINE)
    return [[cell.strip() for cell in row.strip("|").split("|")] for row in text.splitlines()]


def test_files_that_the_readme_links_exist():
    links = re.findall(r"\]\(([^)#:]+)[)#]", README)
    assert len(links) > 30
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_every_row_of_what_it_can_do_names_a_recipe_and_what_tests_it():
    named = set()
    for *_, keys, tested in table("model"):
        names = re.findall(r"`([^`]+)`", keys)
        assert names and "](" in tested, keys
        named.update(name for name in names if not name.startswith("--"))
    assert named == set(shipped_recipes())


def ratios(file: str) -> set[str]:
    comparisons = json.loads((ROOT / file).read_text(encoding="utf-8"))["comparisons"]
    return {f"{comparison['median_of_ratios']:.1f}" for comparison in comparisons}


def test_figures_of_how_it_compares_are_measured():
    rows = table("what")
    assert len(rows) >= 8
    for what, _, figures, link in rows:
        (file,) = re.findall(r"\]\(([^)]+)\)", link)
        assert set(figures.split(", ")) <= ratios(file), what


@pytest.mark.parametrize(("ratio", "cell"), [(1.15, "at most 1.15: met"), (1.22, "at most 1.15: **missed**")])
def test_measured_results_say_which_target_was_missed(ratio: float, cell: str):
    target = RatioTarget(value=1.15, is_limit=True, numerators=("ray",))
    assert target.cell({"numerator": "ray", "ratio_of_medians": ratio}) == cell
    assert target.cell({"numerator": "another", "ratio_of_medians": ratio}) == ""


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a page in one language."""
    pattern = rf"^```{language}(?: title=.*)?\n(.*?)^```$"
    return re.findall(pattern, page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def commands(file: Path) -> Iterator[Any]:
    """The arguments of each command `rlinf` in blocks of bash, without those that leave something out."""
    text = file.read_text(encoding="utf-8")
    lines = [line for block in blocks(file, "bash") for line in block.replace("\\\n", "").splitlines()]
    if file == HOW_DO_I:
        lines += [" ".join(code.split()) for code in inline_code(text) if code.startswith("rlinf ")]
    for line in lines:
        if (command := re.search(r"(?:^|\bdo )\s*(?:[A-Z_]+=\S* )*rlinf .*?(?=;|$)", line)) is None:
            continue
        arguments = shlex.split(re.sub(r"\$\w+", "1", command[0]), comments=True)  # $seed of a loop
        arguments = arguments[arguments.index("rlinf") + 1 :]
        if not {"...", "&&"} & set(arguments):
            yield pytest.param(arguments, id=f"{file.name}: {line[:50]}")


def inline_code(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE))


@pytest.mark.parametrize(
    "arguments",
    [one for page in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) for one in commands(page)],
)
def test_commands_of_the_pages_are_accepted(arguments: list[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "examples"))
    parser = make_parser()
    own_arguments, overrides = split_overrides(arguments, parser.options(arguments))
    args, unknown = parser.parse_known_args(own_arguments)
    assert unknown == []
    assert not overrides or args.takes_overrides
    recipe = getattr(args, "recipe", None)
    recipe = "gsm8k-grpo" if recipe == "RECIPE" else recipe
    if args.command == "train" and recipe in shipped_recipes():
        load_config(recipe, parse_overrides([*_needed(recipe), *overrides]))
    else:
        keys = [".".join(override.key) for override in parse_overrides(overrides)]
        assert [key for key in keys if not is_key(re.sub(r"^[ab]\.", "", key))] == []  # a.KEY of a comparison


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(block, id=f"{page.name}: {block[:30]}")
        for page in sorted((ROOT / "docs").rglob("*.md"))
        for block in blocks(page, "yaml")
        if re.search(r"^extends: ", block, flags=re.MULTILINE)
    ],
)
def test_recipes_of_the_pages_are_accepted(recipe: str, tmp_path: Path):
    file = tmp_path / "recipe.yaml"
    file.write_text(recipe, encoding="utf-8")
    load_config(str(file), parse_overrides(_needed(yaml.safe_load(recipe)["extends"])))


def test_what_a_short_answer_quotes_is_printed(capsys: pytest.CaptureFixture[str]):
    text = HOW_DO_I.read_text(encoding="utf-8")
    fenced = re.findall(r"^```(bash|text)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    quotes = [(before, block) for (_, before), (language, block) in pairwise(fenced) if language == "text"]
    assert quotes
    for command, quote in quotes:
        assert main(shlex.split(command.replace("\\\n", ""))[1:]) == 0
        assert quote in capsys.readouterr().out


def test_the_clip_ranges_of_the_page_are_those_of_the_presets():
    page = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8").partition("## Clip ranges")[2]
    rows = [
        row.strip("|").split("|") for row in re.findall(r"^\| `.*$", page.partition("\n## ")[0], flags=re.MULTILINE)
    ]
    ranges = {
        name: (low.strip(), high.strip()) for names, low, high, _ in rows for name in re.findall("`(.+?)`", names)
    }
    algorithms = {name: preset(name, samples="episodes") for name in EPISODE_PRESETS} | {
        name: preset(name) for name in PRESETS
    }
    assert ranges == {name: (json.dumps(one.clip_low), json.dumps(one.clip_high)) for name, one in algorithms.items()}


def is_key(name: str) -> bool:
    """Whether this is a whole key, or a name of the user's in a mapping such as env.options."""
    parts = name.removeprefix("suite.").split(".")
    if name in SuiteEvalConfig.model_fields or name.removeprefix("compare.") in CompareConfig.model_fields:
        return True
    for length in range(len(parts), 0, -1):
        try:
            notes, explanations = explain_key(".".join(parts[:length]))
        except UserError:
            continue
        if notes == [] and (length == len(parts) or any("mapping" in one.entry.type for one in explanations)):
            return True
    return False


def test_keys_that_the_short_answers_name_exist():
    sections = {name for model in SHIPPED for name in model.model_fields}
    codes = inline_code(HOW_DO_I.read_text(encoding="utf-8"))
    matches = [re.match(r"(?:--)?([a-z_]+\.[a-z_.]*[a-z])(?![\w*.-])", code) for code in codes]
    keys = [match[1] for match in matches if match and match[1].partition(".")[0] in sections]
    assert len(keys) > 20
    assert [key for key in keys if not is_key(key)] == []


def _needed(recipe: str) -> list[str]:
    """The keys of the user's model and data that a recipe leaves open."""
    values = read_recipe(recipe).values
    return [
        one for one in NEEDED if values.get(one[2:].partition(".")[0], {}).get(re.split("[.=]", one)[1], "") is None
    ]


def test_every_page_is_linked_from_the_landing_page():
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages - set(re.findall(r"\]\(([a-z-]+\.md)[)#]", INDEX)) == set()
