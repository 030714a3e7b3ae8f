"""`rlinf play RUN`: plays episodes of a robot policy and writes a film, a table and a page."""

from __future__ import annotations

import argparse
import errno
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlinf.address_space import check_address_space
from rlinf.cli.output_folder import cannot_write, new_folder
from rlinf.config.downloads import with_downloads
from rlinf.config.overrides import parse_overrides, refuse_misspelt_options
from rlinf.config.playing import TrainedConfig
from rlinf.config.protocols import chosen_protocol
from rlinf.console.live_line import LiveLine
from rlinf.errors import UserError
from rlinf.run_folder.lock import check_empty

OPTIONS = (
    "--output",
    "--checkpoint",
    "--episodes",
    "--seed",
    "--protocol",
    "--one-by-one",
    "--no-video",
    "--traceback",
    "--help",
)

POLICY_HELP = """folder of an embodied run, one of its checkpoints, or a recipe with a published checkpoint in
policy.options.folder"""

EPISODES = 8
"""Number of episodes without --episodes and --protocol."""
MAX_ROWS = 100
"""Episodes that are printed."""

DESCRIPTION = """Runs a robot policy, of a run or a published one, without exploration in its environment, or in another
one, and writes its success with a 95 % interval, a film (a grid by task, successes framed green, failures red), a table
of the episodes, and an HTML page with the film and the actions and rewards of each episode."""

EPILOG = """Keys of the run's config can be overridden: --env.id push-v3, --env.max_episode_steps 200, --env.options
'{cameras: [corner2]}', --policy.options.num_denoising_steps 10, --cluster.num_devices 1. The film shows the
policy's images, or rendered ones if it reads none. docs/playing.md explains it."""


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "play", help="score a robot policy, and film its episodes", description=DESCRIPTION, epilog=EPILOG
    )
    parser.add_argument("path", metavar="RUN", help=POLICY_HELP)
    parser.add_argument(
        "--checkpoint", metavar="WHICH", help="checkpoint of a run: newest (default), best, or step-000100"
    )
    parser.add_argument("--episodes", type=int, metavar="N", help="number of episodes (default: 8)")
    parser.add_argument("--seed", type=int, metavar="S", help="first seed (default: that of the run's evaluations)")
    parser.add_argument(
        "--protocol", metavar="NAME", help="evaluate LIBERO as openvla, openpi, lerobot or simplevla publish it"
    )
    parser.add_argument(
        "--one-by-one",
        action="store_true",
        help="answer one environment at a time, so that numbers depend on no batch (default with --protocol on CPUs)",
    )
    parser.add_argument("--no-video", action="store_true", help="do not film (films need the extra rlinf[video])")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="output folder (default: runs/play-<run>-<time>)")
    parser.set_defaults(run=run, takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    refuse_misspelt_options(args.overrides, OPTIONS, set(TrainedConfig.model_fields), "rlinf play")
    if args.episodes is not None and args.episodes < 1:
        raise UserError(f"--episodes {args.episodes}: play at least 1")
    overrides = parse_overrides(args.overrides)
    check_address_space()
    from rlinf.jobs.checks import check_trained_references
    from rlinf.playing.checkpoint import find_policy

    policy = find_policy(args.path, args.checkpoint, overrides)
    num_episodes, first_seed = args.episodes or EPISODES, args.seed
    if args.protocol is not None:
        chosen = chosen_protocol(args.protocol, policy.config)
        policy = find_policy(args.path, args.checkpoint, [*chosen.overrides, *overrides])
        policy = replace(policy, config=policy.config.with_notes([*policy.config.notes, chosen.note]))
        num_episodes = args.episodes or chosen.num_episodes
        first_seed = chosen.first_seed if first_seed is None else first_seed
    policy = replace(policy, config=with_downloads(policy.config))
    check_trained_references(policy.config)
    path = args.output or new_folder(f"play-{policy.config.name}")
    check_empty(path, can_resume=False)
    line = LiveLine()
    with line.doing("loading torch, then checking the policy, the environment and the devices"):
        from rlinf.playing import play  # imports torch

        prepared = play.prepare(
            policy,
            path,
            first_seed=first_seed,
            num_episodes=num_episodes,
            films=not args.no_video,
            one_by_one=args.one_by_one,
            is_citable=args.protocol is not None,
        )
    with line.doing(f"playing {num_episodes} episodes"):
        playback = _played(prepared, path, ["rlinf", *args.arguments], line)
    return _print(playback)


def _played(prepared: Any, path: Path, command: list[str], line: LiveLine) -> Any:
    try:
        return prepared.run(path, command=command, message=line.message)
    except OSError as error:
        if error.errno == errno.ENOMEM:
            raise
        raise cannot_write(path, error) from error


def _print(outputs: Any) -> int:
    from rlinf.cli.table import aligned
    from rlinf.playing.tables import EPISODE_COLUMNS, SUMMARY_COLUMNS, by_task, episode_row, summary_rows

    rows = [episode_row(end) for end in by_task(outputs.episodes)]
    print(f"\n{aligned([EPISODE_COLUMNS, *rows[:MAX_ROWS]])}")
    if len(rows) > MAX_ROWS:
        print(f"and {len(rows) - MAX_ROWS} more episodes; the page lists all")
    print(f"\n{aligned([SUMMARY_COLUMNS, *summary_rows(outputs.episodes, outputs.groups)])}\n")
    if outputs.film is not None:
        print(f"film: {outputs.film}")
    print(f"page: {outputs.page}")
    return 0
