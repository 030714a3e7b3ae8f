"""`rlinf completion`: prints a script with which bash or zsh completes commands, options, recipes and keys."""

from __future__ import annotations

import argparse
from typing import Any

from rlinf.config.annotations import literals_of
from rlinf.config.catalog import read_recipe, shipped_recipes
from rlinf.config.evaluation import EvalConfig
from rlinf.config.messages import all_keys, dotted
from rlinf.config.schema import SHIPPED

SCRIPT = """_rlinf() {{
  local word=${{COMP_WORDS[COMP_CWORD]}} command=${{COMP_WORDS[1]}} words=
  if [ "$COMP_CWORD" = 1 ]; then
    words="{commands}"
  elif [[ $word == --* ]]; then
    case $command in
{options}
    esac
  else
    case $command in
      {take_recipes}) words="{recipes}" ;;
    esac
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}}
if [ -n "${{ZSH_VERSION:-}}" ]; then autoload -U +X bashcompinit && bashcompinit; fi
complete -o default -F _rlinf rlinf"""
TAKE_RECIPES = ("train", "profile", "plan", "check", "config")
"""Commands that take a recipe and its keys."""


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "completion",
        help="print a script for completion in bash or zsh",
        description="Prints a completion script for bash and zsh. In ~/.bashrc: source <(rlinf completion)",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from rlinf.cli.main import COMMANDS, make_parser  # which imports this module

    parser = make_parser()
    keys = dict.fromkeys(TAKE_RECIPES, _recipe_keys()) | {"eval": _keys_of(EvalConfig, {})}
    options = {name: sorted({*parser.options([name]), *keys.get(name, ())}) for name in COMMANDS}
    print(
        SCRIPT.format(
            commands=" ".join(COMMANDS),
            options="\n".join(f'      {name}) words="{" ".join(words)}" ;;' for name, words in options.items()),
            take_recipes="|".join(TAKE_RECIPES),
            recipes=" ".join(shipped_recipes()),
        )
    )
    return 0


def _recipe_keys() -> set[str]:
    """Returns the keys of the jobs and kinds of the shipped recipes."""
    jobs = {literals_of(job, "job")[0]: job for job in SHIPPED}
    trees = [read_recipe(name).values for name in shipped_recipes()]
    return {key for values in trees for key in _keys_of(jobs[values["job"]], values)}


def _keys_of(model: Any, values: Any) -> set[str]:
    return {f"--{dotted(key)}" for key in all_keys(model, (), values)}
