"""`rlinf check`: checks before a long run that engine and trainer compute the same model, or that a robot policy and
its environment agree on conventions."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.cli.table import aligned
from rlinf.config.catalog import shipped_recipes
from rlinf.config.common import JobConfig
from rlinf.config.downloads import with_downloads
from rlinf.config.load import load_config, to_yaml
from rlinf.config.overrides import parse_overrides
from rlinf.errors import UserError
from rlinf.jobs.checks import run_checks
from rlinf.jobs.spec import job_spec

if TYPE_CHECKING:
    from rlinf.jobs.reasoning.job import ReasoningJob
    from rlinf.loop.check import Check, CheckedRound

MISMATCH = 1
DEMONSTRATIONS = "demonstrations"


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "check",
        help="check that engine and trainer compute the same model; that a robot policy and its environment agree",
        description="Of a language model, starts a recipe's engine and trainer on their devices, syncs the weights, "
        "samples 8 prompts and compares the log-probabilities of every token; then repeats it after one optimizer "
        "step. Of a robot policy, compares its answers with demonstrations, as configured and with one convention "
        "after the other changed (rotation of pictures, order of cameras, gripper, statistics, ...), and names the "
        "one that is wrong. Nothing is saved.",
        epilog="exit code 0: nothing is wrong; 1: something is, or a process failed; 2: the input is wrong. "
        "docs/trust.md explains the bounds, docs/conventions.md the conventions.",
    )
    parser.add_argument(
        "recipe",
        help="name of a shipped recipe, or path of a YAML file, with overrides as in train; of a robot policy also a "
        "run's folder or one of its checkpoints",
    )
    parser.add_argument(
        "--demonstrations",
        metavar="PATH",
        help="robot policies: folder or file of demonstrations (LeRobot, LIBERO, ManiSkill), or experts (default: "
        "those of the recipe's sft_warm_up, else the environment's scripted experts)",
    )
    parser.add_argument("--checkpoint", metavar="WHICH", help="robot policies: as in rlinf play")
    parser.set_defaults(run=run, takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    overrides = parse_overrides(args.overrides)
    if Path(args.recipe).is_dir() and args.recipe not in shipped_recipes():
        from rlinf.cli.check_robot import run_check

        return run_check(args, overrides)
    config = load_config(args.recipe, [one for one in overrides if one.key[0] != DEMONSTRATIONS])
    if job_spec(config).acts:
        from rlinf.cli.check_robot import run_check

        return run_check(args, overrides)
    refuse_options_of_robots(args)
    config = load_config(args.recipe, overrides)
    if not job_spec(config).samples_text:
        raise UserError(
            f"{args.recipe} is a recipe of job={config.job}, in which no engine samples and no policy acts",
            hint="rlinf check is for job=reasoning and job=embodied",
        )
    for note in config.notes:
        print(f"note: {note}")
    config = with_downloads(config)
    run_checks("config", config)
    return _check(config, ["rlinf", *args.arguments])


def refuse_options_of_robots(args: argparse.Namespace) -> None:
    """Raises: UserError."""
    for name in (DEMONSTRATIONS, "checkpoint"):
        if getattr(args, name) is not None:
            raise UserError(f"--{name}={getattr(args, name)} is for robot policies; {args.recipe} is of another job")


def _check(config: JobConfig, command: list[str]) -> int:
    from rlinf.processes import fork_server

    fork_server.start(config)
    from rlinf import jobs  # imports torch
    from rlinf.jobs.reasoning.job import ReasoningJob
    from rlinf.loop.check import check
    from rlinf.run_folder import RunFolder

    job = jobs.prepare(config)
    assert isinstance(job, ReasoningJob), "its config says so"
    with tempfile.TemporaryDirectory(prefix="rlinf-check-") as scratch:
        path = Path(scratch) / "run"
        with RunFolder(
            path, config_yaml=to_yaml(job.config), command=command, keep_checkpoints=1, trace_bytes=0
        ) as folder:
            outcome = check(job, folder)
    print(verdict_screen(job, outcome))
    return 0 if outcome.passes else MISMATCH


def verdict_screen(job: ReasoningJob, check: Check) -> str:
    """Returns the result of a check as text for the terminal."""
    config, rounds = job.config, check.rounds
    title = f"{config.name}: {config.rollout.engine} serves, {config.actor.backend} trains; {job.arithmetics[None]}"
    rows = [
        ("", *(one.name for one in rounds)),
        ("policy version, engine", *("/".join(map(str, sorted(one.engine_versions))) for one in rounds)),
        ("policy version, trainer", *(str(one.trainer_version) for one in rounds)),
        ("tokens", *(f"{one.num_tokens:,}" for one in rounds)),
        ("distance, mean", *(f"{one.gap.mean:.2g}" for one in rounds)),
        ("distance, 99.9 %", *(f"{one.agreement.p999:.2g}" for one in rounds)),
        ("distance, worst", *(f"{one.agreement.largest:.2g}" for one in rounds)),
        ("KL", *(f"{one.agreement.kl:.2g}" for one in rounds)),
        ("KL that rounding explains", *(f"{one.agreement.kl_bound:.2g}" for one in rounds)),
        *_trained_rows(rounds),
        ("verdict", *("agree" if one.agreement.agrees else "DISAGREE" for one in rounds)),
    ]
    worst_round = max(rounds, key=lambda one: (not one.agreement.agrees, one.agreement.largest))
    tokens = [(f"worst tokens, {worst_round.name}", "engine", "trainer", "distance")]
    for token in worst_round.worst:
        around = (job.prompts.tokenizer.decode(ids)[-24:] for ids in (token.before, (token.token,)))
        text = "{} >{}<".format(*around)
        tokens.append((repr(text), f"{token.rollout_logprob:.6f}", f"{token.actor_logprob:.6f}", f"{token.gap:.2g}"))
    times = ", ".join(f"{one.name}: sync {one.sync_s:.2f} s, generation {one.generate_s:.2f} s" for one in rounds)
    weights = (
        f"weights: {check.weights_bytes / 2**20:.3g} MiB a sync, what arrived met the trainer's digests; processes up "
        f"in {check.start_s:.1f} s; {times}"
    )
    return "\n\n".join([title, aligned(rows), aligned(tokens), weights, _verdict(check)])


def _trained_rows(rounds: Sequence[CheckedRound]) -> list[tuple[str, ...]]:
    """With quantized weights, the rows above compare the engine with the trainer that has them, too."""
    gaps = [one.trained_gap for one in rounds if one.trained_gap is not None]
    if not gaps:
        return []
    return [
        ("unquantized trainer: distance, mean", *(f"{gap.mean:.2g}" for gap in gaps)),
        ("unquantized trainer: KL", *(f"{gap.kl:.2g}" for gap in gaps)),
    ]


def _verdict(check: Check) -> str:
    wrong = [one for one in check.rounds if not one.has_right_version]
    if wrong:
        names = ", ".join(map(str, sorted(wrong[0].engine_versions)))
        return f"MISMATCH: the engine samples with version {names} where the trainer has {wrong[0].trainer_version}"
    if not check.passes:
        bad = next(one for one in check.rounds if not one.agreement.agrees)
        return f"MISMATCH, {bad.name}: {bad.agreement.text}"
    doubt = (
        ""
        if check.can_tell_versions
        else " The step was too small beside rounding for an engine that missed it to be found by its numbers."
    )
    return f"engine and trainer agree as far as rounding lets them.{doubt}"
