"""`rlinf check RECIPE`: checks before a long run that engine and trainer compute the same model."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlinf.cli.table import aligned
from rlinf.config.common import JobConfig
from rlinf.config.downloads import with_downloads
from rlinf.config.load import load_config, to_yaml
from rlinf.config.overrides import parse_overrides
from rlinf.errors import UserError
from rlinf.jobs.checks import run_checks
from rlinf.jobs.spec import job_spec

if TYPE_CHECKING:
    from rlinf.jobs.reasoning.job import ReasoningJob
    from rlinf.loop.check import Check

MISMATCH = 1


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "check",
        help="check that a recipe's engine and trainer compute the same model",
        description="Starts a recipe's engine and trainer on their devices, syncs the weights, samples 8 prompts and "
        "compares the log-probabilities of every token; then repeats it after one optimizer step. Nothing is saved.",
        epilog="exit code 0: they agree within rounding; 1: they do not, or a process failed; 2: the input is wrong. "
        "docs/trust.md explains the bounds.",
    )
    parser.add_argument("recipe", help="name of a shipped recipe, or path of a YAML file; with overrides as in train")
    parser.set_defaults(run=run, takes_overrides=True)


def run(args: argparse.Namespace) -> int:
    config = load_config(args.recipe, parse_overrides(args.overrides))
    if not job_spec(config).samples_text:
        raise UserError(
            f"{args.recipe} is a recipe of job={config.job}, whose policy acts and trains in one library",
            hint="rlinf check is for job=reasoning, where an engine samples",
        )
    for note in config.notes:
        print(f"note: {note}")
    config = with_downloads(config)
    run_checks("config", config)
    return _check(config, ["rlinf", *args.arguments])


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
