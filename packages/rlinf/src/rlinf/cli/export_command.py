"""`rlinf export RUN --output FOLDER`: writes a checkpoint's model for use by other tools, or uploads it to the Hub."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from rlinf.cli.output_folder import cannot_write
from rlinf.errors import UserError
from rlinf.run_folder.export import BEST, DTYPES, NEWEST, Exported, export, find_checkpoint
from rlinf_workers import printable


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "export",
        help="write a checkpoint's model as a Hugging Face folder",
        description="Writes a trained language model with its config and tokenizer into a folder that transformers and "
        "inference engines can load, or a robot policy in the format of the published checkpoint that it started from. "
        "The checkpoint's digests are checked first. A model card (README.md) states recipe, base model, versions and "
        "scores.",
    )
    parser.add_argument("path", type=Path, metavar="RUN", help="folder of a run, or one of its checkpoints")
    parser.add_argument("--output", type=Path, metavar="FOLDER", help="new folder")
    parser.add_argument(
        "--push",
        metavar="USER/NAME",
        help="upload the model with its card to the Hugging Face Hub; without --output, a temporary folder is used",
    )
    parser.add_argument("--private", action="store_true", help="with --push: a new model is private")
    parser.add_argument(
        "--checkpoint",
        metavar="WHICH",
        help=f"checkpoint of a run: {NEWEST} (default), {BEST} by its score, or a name such as step-000100",
    )
    parser.add_argument(
        "--policy", metavar="NAME", help="a further policy of a run whose agents have several (default: the first)"
    )
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: as trained)")
    parser.add_argument(
        "--merged", action="store_true", help="for a run with LoRA: write the base merged with the adapter"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if args.output is None and args.push is None:
        raise UserError("rlinf export: no place to write to", hint="give --output FOLDER, --push USER/NAME, or both")
    if args.private and args.push is None:
        raise UserError("--private applies to an upload", hint="add --push USER/NAME, or leave it out")
    checkpoint = find_checkpoint(args.path, args.checkpoint)
    if args.push is not None:
        from rlinf.hub import check_push

        check_push(args.push)
    with tempfile.TemporaryDirectory(prefix="rlinf-export-") as temporary:
        exported = _exported(args, checkpoint, args.output or Path(temporary) / "model")
        _print(exported)
        if args.push is not None:
            _push(args, exported)
    return 0


def _exported(args: argparse.Namespace, checkpoint: Path, folder: Path) -> Exported:
    try:
        return export(checkpoint, folder, args.dtype, merged=args.merged, name=args.push, policy=args.policy)
    except PermissionError as error:
        raise cannot_write(folder, error) from error


def _push(args: argparse.Namespace, exported: Exported) -> None:
    """Uploads what was exported; it stays where the user named a folder."""
    from rlinf.hub import push_model

    message = f"Upload {exported.checkpoint.name} of {exported.checkpoint.parent.parent.name}, trained by RLinf"
    try:
        print(push_model(exported.folder, args.push, private=args.private, message=message))
    except UserError as error:
        if args.output is None:
            raise
        again = f"{error.hint}. {args.output} is complete: later, hf upload {args.push} {args.output} uploads it"
        raise UserError(error.message, hint=again) from error


def _print(exported: Exported) -> None:
    score = "" if exported.score is None else f", {printable(exported.score_name)} {exported.score:.3g}"
    files = "1 file" if exported.num_files == 1 else f"{exported.num_files} files"
    if exported.left_out:
        score += f"\nleft out, because the format has no place for it: {', '.join(exported.left_out)}"
    print(f"{exported.checkpoint}{score}\n{exported.folder}: {exported.num_bytes:,} bytes of weights in {files}")
