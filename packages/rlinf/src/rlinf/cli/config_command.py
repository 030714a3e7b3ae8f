"""`rlinf config list | show RECIPE | schema`: lists recipes, shows a resolved recipe, prints the JSON schema."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rlinf.cli.table import hanging
from rlinf.config.catalog import shipped_recipes
from rlinf.config.overrides import parse_overrides
from rlinf.config.schema import json_schema
from rlinf.config.show import show_recipe


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("config", help="list and show recipes, and the schema of their keys")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    listing = actions.add_parser(
        "list",
        help="list the shipped recipes",
        description="Lists the shipped recipes; rlinf train NAME runs one.",
    )
    listing.set_defaults(run=list_recipes)
    show = actions.add_parser(
        "show",
        help="show a recipe with every key, after overrides, as YAML",
        description="Shows a recipe with every key and its value, as YAML. Takes overrides as rlinf train: --seed 1.",
    )
    show.add_argument("recipe", help="name of a shipped recipe, or path of a YAML file")
    show.set_defaults(run=print_recipe, takes_overrides=True)
    schema = actions.add_parser("schema", help="print the JSON schema of recipes, for editors")
    schema.set_defaults(run=print_schema)


def list_recipes(args: argparse.Namespace) -> int:
    recipes = shipped_recipes()
    width = max(map(len, recipes))
    for name, text in recipes.items():
        print(hanging(name, text, width + 2))
    return 0


def print_recipe(args: argparse.Namespace) -> int:
    print(show_recipe(args.recipe, parse_overrides(args.overrides)), end="")
    return 0


def print_schema(args: argparse.Namespace) -> int:
    print(json.dumps(json_schema(), indent=2))
    return 0
