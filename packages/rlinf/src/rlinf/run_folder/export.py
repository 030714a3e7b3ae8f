"""Exports a checkpoint's model: a language model as a Hugging Face folder, a robot policy in the format of the
checkpoint that it started from."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rlinf.config.inputs import is_adapter
from rlinf.errors import UserError
from rlinf.run_folder.adapters import changes_policy, write_merged
from rlinf.run_folder.checkpoints import (
    CHECKPOINTS,
    MODEL,
    best_checkpoint,
    checkpoint_steps,
    further_policies,
    is_checkpoint,
    policy_folder,
    read_state,
    writing_whole,
)
from rlinf.run_folder.checksums import checked_files, damage
from rlinf.run_folder.model_card import write_card
from rlinf.run_folder.plain_files import copy_plain

CONFIG = "config.json"
BEST, NEWEST = "best", "newest"
DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True, slots=True)
class Exported:
    """Result of an export."""

    checkpoint: Path
    score: float | None
    """The checkpoint's score; None if it was not evaluated."""
    score_name: str
    """Metric of the score."""
    folder: Path
    num_bytes: int
    """Total size of the weight files."""
    num_files: int
    """Number of weight files."""
    left_out: tuple[str, ...] = ()
    """Modules of a robot policy for which its published format has no place."""


def find_checkpoint(path: Path, which: str | None) -> Path:
    """Returns the checkpoint that a command line names.

    Args:
        path: a run's folder or a checkpoint.
        which: `newest` (the default), `best` or a checkpoint's name; must be None if `path` is a checkpoint.

    Raises: UserError.
    """
    if is_checkpoint(path) and path.is_dir():
        if which is not None:
            raise UserError(f"--checkpoint {which}: {path} is a checkpoint already", hint="leave --checkpoint out")
        return path.resolve()
    folder = path / CHECKPOINTS
    if not (path / "manifest.json").is_file() and not folder.is_dir():
        what = "is no folder of a run and no checkpoint" if path.is_dir() else "does not exist"
        raise UserError(f"{path} {what}", hint="give the --output of rlinf train, or one of its checkpoints/step-*")
    steps = [checkpoint for _, checkpoint in checkpoint_steps(folder)]
    if not steps:
        raise UserError(f"{path}: the run has no checkpoint yet", hint="let it run on, or --resume it")
    if which == BEST:
        best = best_checkpoint(folder)
        if best is None:
            raise UserError(
                f"{path}: none of its checkpoints was evaluated, so none is the best",
                hint="use --checkpoint newest, or see --run.evaluate_every and --run.checkpoint_every",
            )
        return best
    checkpoint = steps[-1] if which in (None, NEWEST) else folder / str(which)
    if checkpoint not in steps:
        names = ", ".join((NEWEST, BEST, *(one.name for one in steps)))
        raise UserError(f"--checkpoint {which}: {path} has no such checkpoint", hint=f"there are {names}")
    return checkpoint


def export(
    checkpoint: Path,
    folder: Path,
    dtype: str | None = None,
    *,
    merged: bool = False,
    name: str | None = None,
    policy: str | None = None,
) -> Exported:
    """Writes the model of a checkpoint with a model card, after checking the digests; the folder appears only when it
    is complete. For a run with LoRA, writes the adapter in peft's format, or with `merged` the base model merged with
    it.

    Args:
        folder: must not exist, or be empty.
        dtype: dtype of the floating-point tensors; None copies them unchanged.
        name: of the model, for its card; None: the folder's name.
        policy: a further policy; None: the policy of model.path.

    Raises: UserError.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"--output={folder} is there already", hint="an export overwrites nothing; choose another name")
    if policy is not None and policy not in (policies := further_policies(checkpoint)):
        raise UserError(
            f"--policy {policy}: {checkpoint} has no such policy",
            hint=f"it has {', '.join(policies)}" if policies else "it has one policy; leave --policy out",
        )
    model = checkpoint / policy_folder(policy) / MODEL
    inside = f"{model.relative_to(checkpoint)}/"
    check_whole(checkpoint, inside)
    adapts = is_adapter(model)
    if merged and not adapts:
        raise UserError(f"--merged: {checkpoint} holds a whole model, no adapter", hint="leave --merged out")
    of_policy = changes_policy(model) if adapts else not (model / CONFIG).is_file()
    left_out: tuple[str, ...] = ()
    with writing_whole(folder) as partial:
        if of_policy and (merged or not adapts):
            from rlinf.playing.published import write_published

            left_out = write_published(checkpoint, partial, dtype)
        elif merged:
            write_merged(model, partial, dtype)
        else:
            write = copy_plain if dtype is None else _in_dtype(dtype)
            for file in checked_files(checkpoint, inside):
                write(file, partial / file.name)
        write_card(partial, checkpoint, name=name or folder.name, policy=policy)
    weights = list(folder.glob("*.safetensors"))
    state = read_state(checkpoint)
    score = state.get("own_score")
    return Exported(
        checkpoint=checkpoint,
        score=score if isinstance(score, float) else None,
        score_name=str(state.get("score_name", "score")).replace("_", " "),
        folder=folder,
        num_bytes=sum(file.stat().st_size for file in weights),
        num_files=len(weights),
        left_out=left_out,
    )


def check_whole(checkpoint: Path, under: str = f"{MODEL}/") -> None:
    """Raises: UserError if a model of a checkpoint is damaged.

    Args:
        under: its folder in the checkpoint.
    """
    problem = damage(checkpoint, under=under)
    if problem is None:
        return
    earlier = [path for _, path in checkpoint_steps(checkpoint.parent) if path.name < checkpoint.name]
    whole = next((path for path in reversed(earlier) if damage(path, under=under) is None), None)
    raise UserError(
        f"checkpoint {checkpoint} is damaged: {problem}",
        hint=f"the newest whole one before it is {whole}" if whole else "copy it again; no earlier one is whole",
    )


def _in_dtype(dtype: str) -> Callable[[Path, Path], object]:
    """Returns a function that copies a file of a model folder with tensors in another dtype."""
    import torch
    from safetensors.torch import load_file

    from rlinf_workers.models import index_name, index_of, write_tensors

    torch_dtype = getattr(torch, dtype)
    index, sizes = index_name(MODEL), dict[str, dict[str, int]]()

    def write(source: Path, target: Path) -> None:
        if source.suffix == ".safetensors":
            tensors = {
                name: tensor.to(torch_dtype) if tensor.is_floating_point() else tensor
                for name, tensor in load_file(source).items()
            }
            write_tensors(target, tensors)
            sizes[source.name] = {name: tensor.nbytes for name, tensor in tensors.items()}
        elif source.name == CONFIG:
            config = json.loads(source.read_text(encoding="utf-8"))
            config[_dtype_key(config)] = dtype
            target.write_text(json.dumps(config, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        elif source.name == index:
            target.write_text(index_of(sizes), encoding="utf-8")
        else:
            copy_plain(source, target)

    return write


def _dtype_key(config: dict[str, object]) -> str:
    """Returns the config's key of the dtype, which differs in transformers before 5."""
    return "torch_dtype" if "torch_dtype" in config else "dtype"
