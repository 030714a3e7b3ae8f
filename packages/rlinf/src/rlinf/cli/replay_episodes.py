"""`rlinf replay RUN --list`, `--step S --env E` and `--export FOLDER`: replays training episodes of a robot's run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from rlinf.address_space import check_address_space
from rlinf.cli.table import aligned
from rlinf.config.load import load_trained
from rlinf.config.overrides import parse_overrides
from rlinf.config.playing import TrainedConfig
from rlinf.console.live_line import LiveLine
from rlinf.errors import UserError

if TYPE_CHECKING:
    from rlinf.episodes.chosen import ChosenEpisode
    from rlinf.episodes.continuing import ContinuingPolicy

OF_EPISODES = ("list", "step", "env", "episode", "film", "no_film", "continue_at", "checkpoint", "export", "fps")
"""Options of this file, as `argparse` names them."""
FPS = 20
"""That of LIBERO's and ManiSkill's tasks; an environment does not tell its own."""


def add_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("training episodes of a robot's run")
    group.add_argument("--list", action="store_true", help="list the kept steps, or with --step their episodes")
    group.add_argument(
        "--step", type=int, metavar="S", help="training step in which the episode ended, counted from 1 as in training"
    )
    group.add_argument("--env", type=int, metavar="E", help="environment or start of the episode, from 0")
    group.add_argument(
        "--episode", type=int, metavar="K", help="which of its episodes that ended in the step, from 0 (default: 0)"
    )
    group.add_argument(
        "--film", type=Path, metavar="PATH", help="the film (default: replays/step-S-env-E.mp4 in the run's folder)"
    )
    group.add_argument("--no-film", action="store_true", help="do not film (films need the extra rlinf[video])")
    group.add_argument(
        "--continue-at", type=int, metavar="N", help="replay N actions, and let the policy act from there to the end"
    )
    group.add_argument(
        "--checkpoint", metavar="WHICH", help="its weights: newest (default), best, or step-000100; for --continue-at"
    )
    group.add_argument(
        "--export",
        type=Path,
        metavar="FOLDER",
        help="write the successful episodes, or those of --step and --env, as a new LeRobot dataset",
    )
    group.add_argument("--fps", type=int, metavar="N", help=f"actions per second in --export (default: {FPS})")


def is_asked(args: argparse.Namespace) -> bool:
    """Whether the command is about episodes, and not about the whole run."""
    return bool(_options_of(args))


def _options_of(args: argparse.Namespace) -> set[str]:
    """The options of this file that the command line has, as `argparse` names them."""
    return {name for name in OF_EPISODES if getattr(args, name) not in (None, False)}


def run(args: argparse.Namespace) -> int:
    _check_together(args)
    config = load_trained(args.run_folder, parse_overrides(args.overrides))
    if args.list:
        return _list(args)
    check_address_space()
    if args.export is not None:
        return _export(args, config)
    if args.step is None or args.env is None:
        raise UserError("give the step and the environment: --step S --env E", hint="--list shows what is kept")
    from rlinf.episodes.chosen import choose, read_step

    chosen = choose(read_step(args.run_folder, args.step), config.env, args.env, args.episode or 0)
    return _replay(args, config, chosen)


def _check_together(args: argparse.Namespace) -> None:
    """Raises: UserError for options that do not belong together."""
    if args.from_step or args.output:
        other = "--output" if args.output else "--from"
        raise UserError(f"{other} is for replays of whole runs, and not for episodes (docs/replay.md)")
    options = {f"--{name.replace('_', '-')}" for name in _options_of(args)}
    for name, needed in (("--checkpoint", "--continue-at"), ("--fps", "--export")):
        if name in options and needed not in options:
            raise UserError(f"{name} is for {needed}")
    for name, allowed in (("--list", {"--step", "--env"}), ("--export", {"--fps", "--step", "--env"})):
        if name in options and (others := sorted(options - allowed - {name})):
            raise UserError(f"{others[0]} does not go together with {name}")
    if args.fps is not None and args.fps < 1:
        raise UserError(f"--fps {args.fps}: at least 1")


def _list(args: argparse.Namespace) -> int:
    from rlinf.episodes.chosen import in_order, kept_files, read_step
    from rlinf.episodes.screen import LIST_COLUMNS, STEP_COLUMNS, list_row, step_row

    if args.step is not None:
        step = read_step(args.run_folder, args.step)
        rows = [list_row(chosen) for chosen in in_order(step) if args.env in (None, chosen.episode.end.env_index)]
        print(aligned([LIST_COLUMNS, *rows]))
        return 0
    files = kept_files(args.run_folder)
    print(aligned([STEP_COLUMNS, *(step_row(read_step(args.run_folder, step)) for step in files)]))
    print(f"\n{sum(file.stat().st_size for file in files.values()) / 2**20:.1f} MB in {len(files)} files")
    return 0


def _export(args: argparse.Namespace, config: TrainedConfig) -> int:
    from rlinf.episodes.exporting import export_lerobot, successes

    line = LiveLine()
    chosen = successes(args.run_folder, args.step, args.env)
    written = export_lerobot(
        args.run_folder,
        config,
        chosen,
        args.export,
        args.fps or FPS,
        show=lambda done: line.show(f"{done} of {len(chosen)} episodes replayed", done, len(chosen), stays=False),
    )
    line.message(f"{args.export}: {written.num_episodes} successful episodes, {written.num_actions} actions")
    for one in written.different:
        line.message(f"left out, as its replay differs: {one}")
    return 1 if written.different else 0


def _replay(args: argparse.Namespace, config: TrainedConfig, chosen: ChosenEpisode) -> int:
    from rlinf.episodes.replaying import REPLAYS, opened_env, write_film
    from rlinf.episodes.screen import (
        REWARD_COLUMNS,
        component_line,
        episode_lines,
        largest_rewards,
        replay_lines,
        reward_rows,
    )
    from rlinf.jobs.films import check_video
    from rlinf_envs import replay_episode

    films, name = not args.no_film, chosen.name
    if films:
        check_video("--no-film replays without a film")
    continue_at: int | None = args.continue_at
    policy = None if continue_at is None else _policy(args, config, chosen)
    with LiveLine().doing("replaying the episode"), opened_env(args.run_folder, config, films=films) as recorder:
        if policy is None or continue_at is None:
            replayed = replay_episode(recorder, chosen.episode)
            lines = replay_lines(replayed, recorder.action_spec)
        else:
            name += f"-continued-at-{continue_at}"
            replayed, lines = policy.continued(recorder, chosen, continue_at)
        problem = recorder.problem
    rewards, components = replayed.recorded.rewards, replayed.recorded.reward_components
    print("\n".join([*episode_lines(chosen, replayed, config.env), *lines]))
    print(f"\n{aligned([(*REWARD_COLUMNS, *components), *reward_rows(rewards, components)])}")
    print(largest_rewards(rewards))
    if components:
        print(component_line(rewards, components))
    if films:
        path = args.film or args.run_folder / REPLAYS / f"{name}.mp4"
        is_written = write_film(path, replayed.recorded)
        print(f"film: {path}" if is_written else f"there is no film: {problem or 'the environment draws nothing'}")
    return 1 if replayed.difference else 0


def _policy(args: argparse.Namespace, config: TrainedConfig, chosen: ChosenEpisode) -> ContinuingPolicy:
    from rlinf.episodes.continuing import ContinuingPolicy, check_continues
    from rlinf.run_folder.export import find_checkpoint

    check_continues(chosen, args.continue_at)
    checkpoint = find_checkpoint(args.run_folder, args.checkpoint)
    with LiveLine().doing("loading the policy"):
        return ContinuingPolicy(config, checkpoint)
