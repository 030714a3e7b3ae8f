"""What the README of the repository names exists, its figures are those of the files that it links, and the commands of
all pages are accepted."""

import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlinf.cli.main import make_parser
from rlinf.config.catalog import read_recipe, shipped_recipes
from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides, split_overrides

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
INDEX = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
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


def commands(file: Path) -> Iterator[Any]:
    """The arguments of each command `rlinf` in blocks of bash, without those that leave something out."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", file.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    for block in blocks:
        for line in block.replace("\\\n", "").splitlines():
            program, *arguments = shlex.split(re.sub(r"\$\w+", "1", line), comments=True) or [""]  # $seed of a loop
            if program == "rlinf" and not {"...", "&&"} & set(arguments):
                yield pytest.param(arguments, id=f"{file.name}: {line[:50]}")


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
    if args.command == "train" and recipe in shipped_recipes():
        load_config(recipe, parse_overrides([*_needed(recipe), *overrides]))


def _needed(recipe: str) -> list[str]:
    """The keys of the user's model and data that a recipe leaves open."""
    values = read_recipe(recipe).values
    return [
        one for one in NEEDED if values.get(one[2:].partition(".")[0], {}).get(re.split("[.=]", one)[1], "") is None
    ]


def test_every_page_is_linked_from_the_landing_page():
    pages = {page.name for page in (ROOT / "docs").glob("*.md")} - {"index.md"}
    assert pages - set(re.findall(r"\]\(([a-z-]+\.md)[)#]", INDEX)) == set()
