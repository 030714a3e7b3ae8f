"""`rlinf export RUN --output FOLDER`: writes a checkpoint's model for use by other tools."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from rlinf.cli.output_folder import cannot_write
from rlinf.run_folder.export import BEST, DTYPES, NEWEST, export, find_checkpoint
from rlinf_workers import printable


def add_parser(subparsers: Any) -> None:
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "export",
        help="write a checkpoint's model as a Hugging Face folder",
        description="Writes a trained language model with its config and tokenizer into a folder that transformers and "
        "inference engines can load, or a robot policy in the format of the published checkpoint that it started from. "
        "The checkpoint's digests are checked first.",
    )
    parser.add_argument("path", type=Path, metavar="RUN", help="folder of a run, or one of its checkpoints")
    parser.add_argument("--output", type=Path, required=True, metavar="FOLDER", help="new folder")
    parser.add_argument(
        "--checkpoint",
        metavar="WHICH",
        help=f"checkpoint of a run: {NEWEST} (default), {BEST} by its score, or a name such as step-000100",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="dtype of the weights (default: as trained)")
    parser.add_argument(
        "--merged", action="store_true", help="for a run with LoRA: write the base merged with the adapter"
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    try:
        exported = export(find_checkpoint(args.path, args.checkpoint), args.output, args.dtype, merged=args.merged)
    except PermissionError as error:
        raise cannot_write(args.output, error) from error
    score = "" if exported.score is None else f", {printable(exported.score_name)} {exported.score:.3g}"
    files = "1 file" if exported.num_files == 1 else f"{exported.num_files} files"
    if exported.left_out:
        score += f"\nleft out, because the format has no place for it: {', '.join(exported.left_out)}"
    print(f"{exported.checkpoint}{score}\n{exported.folder}: {exported.num_bytes:,} bytes of weights in {files}")
    return 0
