"""`rlinf check` of a robot policy: finds the convention that is wrong."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from rlinf.address_space import check_address_space
from rlinf.config.downloads import with_downloads
from rlinf.config.load import load_robot_check
from rlinf.config.overrides import Override
from rlinf.console.live_line import LiveLine
from rlinf.errors import UserError
from rlinf_envs import EXPERTS

WRONG = 1


def run_check(args: argparse.Namespace, overrides: Sequence[Override]) -> int:
    """Returns 0 if nothing is wrong, else 1."""
    check_address_space()
    from rlinf.jobs.checks import check_trained_references
    from rlinf.playing.checkpoint import named_checkpoint
    from rlinf.run_folder.checkpoints import MODEL
    from rlinf.run_folder.export import check_whole

    checkpoint = named_checkpoint(args.recipe, args.checkpoint)
    if checkpoint is not None:
        check_whole(checkpoint)
    config = load_robot_check(args.recipe, checkpoint, _demonstrations(args.demonstrations), overrides)
    for note in config.notes:
        print(f"note: {note}")
    config = with_downloads(config)
    check_trained_references(config)
    line = LiveLine()
    step = "loading torch"
    with line.doing(lambda: step):
        from rlinf.conventions.screen import verdict_text
        from rlinf.conventions.setup import check_robot  # imports torch

        def progress(text: str) -> None:
            nonlocal step
            step = text

        model = None if checkpoint is None else checkpoint / MODEL
        verdict = check_robot(config, model, progress=progress)
    title = f"{config.name}, policy {config.policy.name} in {config.env.id}"
    print(verdict_text(title, verdict))
    return 0 if verdict.passes else WRONG


def _demonstrations(named: str | None) -> dict[str, str]:
    """The section `demonstrations` for the value of --demonstrations. Raises: UserError."""
    if named is None:
        return {}
    if named == EXPERTS:
        return {"source": EXPERTS}
    from rlinf.conventions.demonstrations import guessed_source

    source = guessed_source(Path(named))
    if source is None:
        what = "is no layout that is known" if Path(named).exists() else "does not exist"
        raise UserError(
            f"--demonstrations {named} {what}",
            hint="give the folder of a LeRobot dataset, LIBERO's .hdf5, ManiSkill's .h5, or experts; or say what it is "
            "with --demonstrations.source and --demonstrations.path",
        )
    return {"source": source, "path": named}
