"""What the README shows is accepted, and the message that it shows is the one that comes."""

import re
import shlex
from pathlib import Path

import pytest

from rlinf.cli.main import main, make_parser
from rlinf.config.catalog import shipped_recipes
from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides, split_overrides
from rlinf.config.reasoning import ReasoningConfig

README = (Path(__file__).parents[1] / "README.md").read_text(encoding="utf-8")


def block(language: str, containing: str) -> str:
    """The code block with a certain text."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", README, flags=re.DOTALL | re.MULTILINE)
    (code,) = [text for text in blocks if containing in text]
    return code


@pytest.mark.parametrize("line", block("bash", "rlinf doctor").splitlines())
def test_every_command_is_accepted(line: str):
    program, *arguments = shlex.split(line, comments=True)
    assert program == "rlinf"
    parser = make_parser()
    own_arguments, overrides = split_overrides(arguments, parser.options(arguments))
    args, unknown = parser.parse_known_args(own_arguments)
    assert unknown == []
    if getattr(args, "recipe", None):
        load_config(args.recipe, parse_overrides(overrides))
    else:
        assert overrides == []


def test_every_recipe_is_listed():
    names = re.findall(r"^\| `([a-z0-9.-]+)` \|", README, flags=re.MULTILINE)
    like_recipes = {name for name in names if re.search(r"-(grpo|ppo)\b", name)}
    assert like_recipes <= set(shipped_recipes()) <= set(names)


def test_the_example_recipe_loads_and_its_mistakes_look_as_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    recipe = block("yaml", "extends")
    Path("my-sort.yaml").write_text(recipe)
    config = load_config("my-sort.yaml")
    assert isinstance(config, ReasoningConfig)
    assert (config.name, config.rollout.max_new_tokens) == ("my-sort", 11)

    command, *expected = block("text", "mistakes").splitlines()
    Path("my-sort.yaml").write_text(recipe.replace("max_new_tokens: 11", "max_new_tokens: 11, temprature: 1"))
    assert main(shlex.split(command)[2:]) == 2
    assert capsys.readouterr().err.splitlines() == expected


def test_what_an_index_shows_of_a_package_has_no_link_into_the_repository():
    readmes = sorted(Path(__file__).parents[2].glob("*/README.md"))
    assert len(readmes) == 6
    links = [(file.parent.name, link) for file in readmes for link in re.findall(r"\]\(([^)]*)\)", file.read_text())]
    assert [(name, link) for name, link in links if not link.startswith(("#", "https://"))] == []
