"""The entry point of vLLM's core process, around vLLM's own: it schedules requests, and starts the worker processes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from rlinf_workers.engines.server_processes import end_with_parent, keep_errors

FOLDER_VARIABLE = "RLINF_VLLM_FOLDER"
"""Env var with the folder that a worker shares with its engine's processes."""


def run_engine_core(*arguments: Any, **keywords: Any) -> None:
    """The target of the core process; takes the arguments of vLLM's `EngineCoreProc.run_engine_core`."""
    end_with_parent()
    keep_errors(Path(os.environ[FOLDER_VARIABLE]), "vllm")
    from vllm.v1.core.sched import output  # pyright: ignore[reportMissingImports]
    from vllm.v1.engine.core import EngineCoreProc  # pyright: ignore[reportMissingImports]

    from rlinf_workers.engines.vllm.tiles import know_largest_picture

    know_largest_picture()
    output.strip_covered_mm_data = keep_pictures
    EngineCoreProc.run_engine_core(*arguments, **keywords)


def keep_pictures(features: Any, *_: Any, **__: Any) -> Any:
    """What a worker process gets of a request's pictures. vLLM 0.32.0 leaves out the pixels of those that its prefix
    cache has at that time; when new weights empty the cache, the worker computes the request again, and has none."""
    return features
