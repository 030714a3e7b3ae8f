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
    from vllm.v1.engine.core import EngineCoreProc  # pyright: ignore[reportMissingImports]

    EngineCoreProc.run_engine_core(*arguments, **keywords)
