"""`rlinf`: parses the command line, and converts errors to a message and an exit code.

0 done    1 the run failed    2 the input is wrong    130 interrupted (Ctrl-C)    143 terminated (SIGTERM)
"""

from __future__ import annotations

import argparse
import difflib
import errno
import os
import re
import signal
import sys
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from rlinf import __version__
from rlinf.address_space import address_space_hint
from rlinf.cli.output_folder import remove_unused_folders
from rlinf.config.annotations import annotation_at
from rlinf.config.foreign_names import FOREIGN
from rlinf.config.overrides import split_overrides
from rlinf.config.schema import SHIPPED
from rlinf.errors import RunFailed, Terminated, UserError
from rlinf_workers import LOG_LEVEL_VARIABLE, LOG_LEVELS, set_up_logging

COMMANDS = {
    "train": "train",
    "eval": "eval_command",
    "play": "play_command",
    "serve": "serve_command",
    "export": "export_command",
    "profile": "profile_command",
    "data": "data_command",
    "plan": "plan_command",
    "check": "check_command",
    "config": "config_command",
    "replay": "replay_command",
    "report": "report_command",
    "explain": "explain_command",
    "compare": "compare_command",
    "venv": "venv_command",
    "doctor": "doctor_command",
    "completion": "completion_command",
}
"""Command -> its module in `rlinf.cli`, imported when the command is used or listed."""

OLD_NAMES = {"venv": "env", "compare": "summary"}
"""Command -> its name in the previous version, still accepted."""
LOG_LEVEL = "--log-level"
FAILED, WRONG_INPUT, INTERRUPTED, TERMINATED = 1, 2, 130, 143


class _Parser(argparse.ArgumentParser):
    """argparse that raises UserError, so that its errors look like all others."""

    def error(self, message: str) -> NoReturn:
        raise UserError(message, hint=f"see {self.prog} --help")

    def options(self, arguments: Sequence[str]) -> set[str]:
        """Returns the options of this command and of the subcommand in `arguments`; for other commands `--mode` is a
        key."""
        flags = set(self._option_string_actions)
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                named = [i for i, argument in enumerate(arguments) if argument in action.choices]
                for i in named[:1]:
                    flags |= action.choices[arguments[i]].options(arguments[i + 1 :])
        return flags


def make_parser(commands: Iterable[str] = COMMANDS) -> _Parser:
    """Builds the parser of these commands, without heavy imports."""
    parser = _Parser(prog="rlinf", description="Reinforcement-learning post-training of foundation models.")
    parser.add_argument("--version", "-V", action="version", version=f"rlinf {__version__}")
    parser.add_argument("--traceback", action="store_true", help="show Python's traceback beside an error's message")
    levels = f"{{{','.join(LOG_LEVELS)}}}"
    logged = "what processes log; workers log to the run's logs/ (default: warning here, info there)"
    parser.add_argument(LOG_LEVEL, metavar=levels, help=logged)
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for command in commands:
        import_module(f"rlinf.cli.{COMMANDS[command]}").add_parser(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; returns the exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    shows_traceback = "--traceback" in arguments
    try:
        arguments = _set_up_logging(arguments)
        if arguments[:1] == ["help"]:
            arguments = [*arguments[1:], "--help"]
        parser = make_parser(arguments[:1] if set(arguments[:1]) & COMMANDS.keys() else COMMANDS)
        own_arguments, overrides = split_overrides(arguments, parser.options(arguments))
        _check_command(own_arguments)
        args, unknown = parser.parse_known_args([argument for argument in own_arguments if argument != "--traceback"])
        if not getattr(args, "takes_overrides", False):
            unknown += overrides
        if unknown:
            raise UserError(f"unknown argument {unknown[0]!r}", hint=_unknown_hint(unknown[0], args.command))
        args.overrides, args.arguments = overrides, arguments
        return args.run(args)
    except KeyboardInterrupt as error:
        print("interrupted; nothing is left running", file=sys.stderr)
        return TERMINATED if isinstance(error, Terminated) else INTERRUPTED
    except BrokenPipeError:
        return _reader_left()
    except (UserError, RunFailed, OSError, MemoryError, RecursionError) as error:
        if shows_traceback:
            raise
        from rlinf_workers import printable_lines

        print(f"error: {printable_lines(_text(error))}", file=sys.stderr)
        return WRONG_INPUT if isinstance(error, UserError | RecursionError) else FAILED
    finally:
        remove_unused_folders()


def _set_up_logging(arguments: list[str]) -> list[str]:
    """Applies `--log-level LEVEL` and returns the other arguments. Raises: UserError."""
    for i, argument in enumerate(arguments):
        name, equals, level = argument.partition("=")
        if name != LOG_LEVEL:
            continue
        level = level if equals else next(iter(arguments[i + 1 :]), "")
        if level not in LOG_LEVELS:
            raise UserError(f"{LOG_LEVEL} {level or 'needs a level'}; allowed: {', '.join(LOG_LEVELS)}")
        os.environ[LOG_LEVEL_VARIABLE] = level  # workers inherit it
        arguments = [*arguments[:i], *arguments[i + (1 if equals else 2) :]]
        break
    set_up_logging("warning")
    return arguments


def _check_command(arguments: Sequence[str]) -> None:
    """Raises: UserError if the first word is not a command."""
    word = next((argument for argument in arguments if not argument.startswith("-")), None)
    if word is not None and word not in (*COMMANDS, *OLD_NAMES.values()):
        close = difflib.get_close_matches(word, COMMANDS, n=1, cutoff=0.5)
        guess = f"; did you mean rlinf {close[0]}?" if close else ""
        raise UserError(f"{word!r} is no command{guess}", hint=f"commands: {', '.join(COMMANDS)}")


def _unknown_hint(argument: str, command: str) -> str:
    """Returns a hint for `actor.optim.lr=1e-6`, the form of overrides in verl and Hydra, maybe with another key
    name."""
    key, equals, value = argument.lstrip("+").partition("=")
    if equals and re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", key):
        if not any(annotation_at(job, tuple(key.split(".")), {}) for job in SHIPPED):
            key = FOREIGN.get(key.rpartition(".")[2], key)
        return f"an override is written --{key} {value or 'VALUE'}"
    return f"see rlinf {command} --help"


def _text(error: BaseException) -> str:
    """Returns the message of an error of this package or of the machine."""
    if isinstance(error, MemoryError):
        hint = address_space_hint(error) or "\nhint: see the limits with ulimit -a"
        return f"out of memory: {error or 'Python could not get any more'}{hint}"
    if isinstance(error, RecursionError):
        return f"something is nested too deep: {error}\nhint: --traceback shows which file is read"
    if isinstance(error, OSError):
        hint = "\nhint: make room on that disk" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        where = f"{error.filename}: " if error.filename is not None else ""
        return f"{where}{error.strerror or error}{hint}{address_space_hint(error)}"
    return f"{error}{address_space_hint(error)}"


def _reader_left() -> int:
    """Handles a closed output pipe, as in `rlinf config show x | head`."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # otherwise Python's flush at exit fails
    return 0


def entry_point() -> NoReturn:
    """Entry point of the console script."""
    from rlinf_workers import keep_compiled_code_private

    keep_compiled_code_private()
    signal.signal(signal.SIGTERM, _terminate)
    signal.signal(signal.SIGINT, _interrupt)  # also where a shell started us with SIGINT ignored, as it does behind `&`
    sys.exit(main())


def _interrupt(*_: Any) -> NoReturn:
    raise KeyboardInterrupt


def _terminate(*_: Any) -> NoReturn:
    raise Terminated
