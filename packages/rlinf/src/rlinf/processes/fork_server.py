"""One process imports torch and the model's code, and the workers of a run on CPU slots are forked from it.

Importing takes a worker some seconds of a core, and a run has five workers or more. The server begins while the driver
still reads its inputs. It is multiprocessing's own and lives as long as the driver, so it is there when a plan moves
processes. Where there is a GPU nothing is forked: what CUDA has touched must not be.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.util
from multiprocessing import forkserver
from pathlib import Path

from rlinf.config.reasoning import ReasoningConfig
from rlinf.config.schema import Config
from rlinf.machine import NVIDIA_DEVICE
from rlinf.processes.environment import worker_environment
from rlinf.processes.machines import launcher_spec
from rlinf_workers.launchers.credentials import worker_variables

AMD_DEVICE = Path("/dev/kfd")
FIRST = "rlinf.processes.fork_server_child"
ROLES = {
    "reasoning": (
        *("language.actor", "language.reference", "language.reward", "language.rollout"),
        "trainers.replicated.backend",
    ),
    "embodied": ("embodied.environment", "embodied.rollout", "embodied.actor", "trainers.replicated.backend"),
}


def start(config: Config) -> bool:
    """Starts the server, unless the run may have a GPU or starts its processes on nodes; returns at once, whether it
    did."""
    if launcher_spec(config.cluster).has_nodes:
        return False
    if config.cluster.device != "cpu" and (NVIDIA_DEVICE.exists() or AMD_DEVICE.exists()):
        return False
    with worker_variables(worker_environment(config.cluster)):  # libraries read them as they are imported
        # Before Python 3.10.9 and 3.11.1 the server takes programs from every user of the machine (CVE-2022-42919).
        multiprocessing.util.abstract_sockets_supported = False
        multiprocessing.set_forkserver_preload([FIRST, *modules(config)])
        forkserver.ensure_running()
    return True


def modules(config: Config) -> list[str]:
    """What the workers import; one that is not there is passed over, and the worker that needs it says so."""
    roles = [f"rlinf_workers.{role}" for role in ROLES[config.job]]
    if not isinstance(config, ReasoningConfig):
        return roles
    family = config.model.architecture.family if config.model.architecture else _family(config.model.path)
    model = [f"transformers.models.{family}.modeling_{family}"] if family else []
    name, colon, _ = config.rollout.engine.partition(":")
    engine = [name if colon else f"rlinf_workers.engines.{name}"] if "rollout" not in config.environments else []
    return [*roles, *engine, *model, "transformers.tokenization_utils_tokenizers"]


def _family(folder: Path | None) -> str:
    """The model family that config.json names; empty where it cannot be read, which the checks of the inputs report."""
    try:
        found = json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"] if folder else ""
    except (OSError, ValueError, KeyError, TypeError):
        return ""
    return found if isinstance(found, str) and found.isidentifier() else ""
