"""Every causal architecture of the installed transformers against its own plain forward: `python -m
benchmarks.models.architectures` writes results/architectures.json and the tables of docs/models.md. Takes about five
minutes of one core; with names, only these are tried again, and the others are taken from the result that is there."""

from __future__ import annotations

import json
import platform
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import transformers
from benchmarks.models.every_architecture import ArchitectureResult, model_types, verdict_on

ROOT = Path(__file__).parents[2]
RESULT = ROOT / "benchmarks" / "results" / "architectures.json"
PAGE = ROOT / "docs" / "models.md"
HEADING = "\n## Every architecture\n"


def tables(verdicts: Sequence[ArchitectureResult], version: str) -> Iterator[str]:
    """Lines of the page from its last heading on."""
    taken, refused = ([one for one in verdicts if (one.refused is None) == is_taken] for is_taken in (True, False))
    worst = max(taken, key=lambda one: (one.largest or 0.0) / (one.bound or 1.0))
    usual = sorted(one.largest or 0.0 for one in taken)
    yield from (
        HEADING.strip(),
        "",
        *textwrap.wrap(
            f"`python -m benchmarks.models.architectures` writes this section. It tests the {len(verdicts)} causal "
            f"architectures of transformers {version} with prompts and completions beyond every window: "
            f"**{len(taken)} are computed correctly, {len(refused)} are refused, 0 are silently wrong**. Half of the "
            f"copies are off by at most {usual[len(usual) // 2]:.1e} nats, all but three by at most {usual[-4]:.1e}; "
            f"closest to its bound is {worst.model_type} ({worst.largest:.1e} of {worst.bound:.1e}).",
            120,
            break_on_hyphens=False,
        ),
        "",
        "| architecture (`model_type`) | engine | `refill` | CUDA graphs | actor | packed actor |",
        "|---|---|---|---|---|---|",
    )
    for one in taken:
        marks = " | ".join(
            "yes" if way in one.ways else "-" for way in ("engine", "refill", "graphs", "actor", "packed")
        )
        yield f"| {one.model_type} | {marks} |"
    yield from ("", "| refused | why |", "|---|---|")
    for one in refused:
        yield f"| {one.model_type} | {(one.refused or '').replace('|', '/')} |"


def main() -> None:
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    before = {}
    if again := set(sys.argv[1:]):
        rows = json.loads(RESULT.read_text(encoding="utf-8"))["architectures"]
        before = {row["model_type"]: ArchitectureResult(**{**row, "ways": tuple(row["ways"])}) for row in rows}
    verdicts = []
    for model_type in model_types():
        is_kept = model_type in before and model_type not in again
        verdicts.append(before[model_type] if is_kept else verdict_on(model_type))
        print(verdicts[-1], flush=True)
    about = {"transformers": transformers.__version__, "torch": torch.__version__, "machine": platform.machine()}
    result = {**about, "architectures": [one.to_json() for one in verdicts]}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    page = PAGE.read_text(encoding="utf-8").partition(HEADING)[0].rstrip("\n")
    lines = tables(verdicts, transformers.__version__)
    PAGE.write_text("\n".join([page, "", *lines, ""]), encoding="utf-8")


if __name__ == "__main__":
    main()
