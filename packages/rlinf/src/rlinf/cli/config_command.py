"""`rlinf config list | show RECIPE | explain KEY | schema`: lists recipes, shows a resolved recipe, explains a key,
prints the JSON schema."""

from __future__ import annotations

import argparse
import json
from typing import Any

from rlinf.cli.table import hanging, wrapped
from rlinf.config.catalog import shipped_recipes
from rlinf.config.explain_key import KeyExplanation, explain_key
from rlinf.config.overrides import parse_overrides
from rlinf.config.reference import REQUIRED
from rlinf.config.schema import json_schema
from rlinf.config.show import show_recipe
from rlinf.errors import UserError


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
    explain = actions.add_parser(
        "explain",
        help="explain a key: type, default, recipes that set it, meaning, page",
        description="Explains a key of a config: its type and range, its default, the recipes that set it, what it "
        "means and which page has more. Takes the names of TRL and verl, too: rlinf config explain num_generations.",
    )
    explain.add_argument("key", nargs="?", help="a key, such as algorithm.clip_high, or its last part")
    explain.set_defaults(run=print_explanation, takes_overrides=True)
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


def print_explanation(args: argparse.Namespace) -> int:
    keys = [*([args.key] if args.key else []), *args.overrides[:1]]  # --actor.lora.rank 8 is a key, too
    if not keys:
        raise UserError("give a key", hint="for example: rlinf config explain algorithm.clip_high")
    notes, explanations = explain_key(keys[0])
    for note in notes:
        print(f"note: {note}")
    print("\n\n".join(map(_explanation_text, explanations)))
    return 0


def _explanation_text(explained: KeyExplanation) -> str:
    entry = explained.entry
    kinds = f" ({', '.join(explained.kinds)})" if explained.kinds else ""
    rows = [("type", entry.type)]
    if explained.by_preset:
        value, _ = explained.by_preset[0]
        others = [f"{other} in {', '.join(names)}" for other, names in explained.by_preset[1:]]
        rows.append(("default", "; ".join([value, *others])))
    elif entry.default:
        rows.append(("default", "none, it is required" if entry.default == REQUIRED else entry.default))
    if explained.by_recipe:
        rows.append(("set by", "; ".join(f"{value} in {', '.join(names)}" for value, names in explained.by_recipe)))
    rows.append(("key of", ", ".join(explained.places)))
    if explained.other_names:
        rows.append(("also called", f"{', '.join(explained.other_names)} (TRL, verl, OpenRLHF)"))
    rows.append(("see", f"docs/{explained.page}"))
    if explained.members:
        rows.append(("keys", ", ".join(dict.fromkeys(member.key for member in explained.members))))
    lines = [f"{entry.key}{kinds}", *wrapped(entry.meaning, indent=2)]
    return "\n".join([*lines, *(hanging(f"  {name}", text, 15) for name, text in rows)])


def print_schema(args: argparse.Namespace) -> int:
    print(json.dumps(json_schema(), indent=2))
    return 0
