"""What is checked of a model folder beyond its files, before any process starts: that its completions can end, that
none of its own code would have to run, and that this system computes its architecture as transformers does."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rlinf.config.common import EngineConfig, TrainerConfig
from rlinf.config.inputs import own_code
from rlinf.errors import UserError
from rlinf.tasks.base import TaskProblem
from rlinf.tasks.videos import ProblemVideo
from rlinf_workers.models import TILED, end_tokens


def config_of(folder: Path) -> dict[str, Any]:
    """Reads config.json of a model."""
    return json.loads((folder / "config.json").read_text(encoding="utf-8"))


def check_end_tokens(folder: Path, tokenizer: Any, key: str = "model.path") -> tuple[str, ...]:
    """Whether a completion of the model can end.

    Returns: a note where files and tokenizer name different end tokens, all of which end completions.
    Raises: UserError where nobody names any.
    """
    named = end_tokens(str(folder), tokenizer)
    if not named:
        raise UserError(
            f"{key}={folder}: nothing names an end token (eos_token_id of generation_config.json, of config.json or of "
            "the tokenizer), so no completion would ever end",
            hint="put the id of the token that ends an answer into generation_config.json: "
            '{"eos_token_id": 2}, for example',
        )
    if len({frozenset(ids) for ids in named.values()}) == 1:
        return ()
    tokens = "; ".join(
        f"{', '.join(str(tokenizer.convert_ids_to_tokens(token) or token) for token in ids)} ({who})"
        for who, ids in named.items()
    )
    return (f"{key}: a completion ends with each of the end tokens {tokens}",)


def code_notes(folder: Path, key: str = "model.path") -> tuple[str, ...]:
    """A note on code in the folder that is not run (`check_model_folder` has refused a folder that needs it)."""
    named = own_code(folder)
    return () if named is None else (f"{key}: {named}, which is not run; transformers' own classes are used",)


def engine_ways(engine: EngineConfig, *, on_gpu: bool) -> tuple[str, ...]:
    """How the engine computes, in the words of `rlinf_workers.roles.language.probe.WAYS`; empty for an engine with a
    model of its own."""
    return engine.engine_spec.probe_ways(engine.engine_options, on_gpu=on_gpu)


def refuse_blind_trainer(actor: TrainerConfig, kind: str) -> None:
    """Raises: UserError for a trainer that does not support pictures.

    Args:
        kind: of the model, which reads them.
    """
    trainer = actor.trainer_spec
    if not trainer.computes_transformers:
        reason, hint = f"actor.backend={trainer.name}", "use --actor.backend fsdp2 or replicated"
    elif trainer.sequence_ranks(actor.backend_options) > 1 and kind in TILED:
        reason = f"actor.backend_options.{trainer.sequence_option}"
        hint = "leave it out: tiles of a picture are not divided among ranks"
    else:
        return
    raise UserError(f"{reason}: does not support pictures, and {kind} reads them", hint=hint)


def refuse_videos_of_agents(problems: Iterable[TaskProblem]) -> None:
    """Raises: UserError for a problem with a video."""
    for problem in problems:
        if any(isinstance(one, ProblemVideo) for one in problem.pictures):
            raise UserError(
                f"{problem.place or 'a problem'} has a video, which agents cannot read",
                hint="leave rollout.agent out, or give some frames as pictures",
            )


def trainer_ways(actor: TrainerConfig, *, packs: bool) -> tuple[str, ...]:
    """The same of what trains."""
    if not actor.trainer_spec.computes_transformers:
        return ()
    return ("packed",) if packs else ("actor",)


def check_architecture(folder: Path, ways: Sequence[str], *, num_tokens: int, key: str = "model.path") -> None:
    """Whether the system computes a model as transformers does, by its config and by a small copy of it.

    Args:
        ways: of `rlinf_workers.roles.language.probe.WAYS`.
        num_tokens: the longest prompt and completion together.
    Raises: UserError.
    """
    if not ways:
        return
    reason = architecture_refusal(folder, ways, num_tokens=num_tokens)
    if reason is not None:
        raise UserError(
            f"{key}={folder}: model_type={config_of(folder).get('model_type')!r} cannot be used here: {reason}",
            hint="docs/models.md lists the architectures that can; some engines and backends have models of their own",
        )


def architecture_refusal(folder: Path, ways: Sequence[str], *, num_tokens: int) -> str | None:
    """Why a model cannot be computed in these ways; None: it can. Arguments as `check_architecture`."""
    from transformers import AutoConfig

    from rlinf_workers.roles import probe_refusal

    config = AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    return probe_refusal(config, ways, num_tokens=num_tokens)
