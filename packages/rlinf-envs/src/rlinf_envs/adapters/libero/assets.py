"""Finds LIBERO's scenes (meshes, textures and XML), which are not part of its package.

Without an existing folder, hf-libero downloads them without asking, in every process. Here, a missing folder is an
error, and downloads must be requested explicitly.
"""

from __future__ import annotations

import importlib
import os
from pathlib import Path

from rlinf_envs.adapters.libero.tasks import package
from rlinf_envs.errors import EnvError

VARIABLE = "RLINF_LIBERO_ASSETS"
HUB = "hub"
_DATASET = "lerobot/libero-assets"
_PARTS = ("articulated_objects", "scenes", "stable_hope_objects", "stable_scanned_objects", "turbosquid_objects")


def assets_folder(assets: str | None = None) -> Path:
    """Returns the folder of the scenes.

    Args:
        assets: a folder, or "hub" to download hf-libero's data set to hf-libero's cache; None searches the env var
            RLINF_LIBERO_ASSETS, the installed package and hf-libero's cache.

    Raises: EnvError with download instructions if there is no such folder, or it holds no scenes.
    """
    if assets == HUB:
        return _downloaded()
    for source, path in (("options.assets", assets), (VARIABLE, os.environ.get(VARIABLE))):
        if path is None:
            continue
        folder = Path(path).expanduser().absolute()
        if lacking := [part for part in _PARTS if not (folder / part).is_dir()]:
            problem = f"lacks {', '.join(lacking)}" if folder.is_dir() else "is not there"
            raise EnvError(f"{source}={path}: the folder {problem}. {_what_to_do()}")
        return folder
    places = (package() / "assets", _cache_folder())
    for folder in places:
        if all((folder / part).is_dir() for part in _PARTS):
            return folder
    looked = f"options.assets and {VARIABLE} are not set, and neither {places[0]} nor {places[1]} holds them"
    raise EnvError(f"LIBERO's scenes are not on this machine: {looked}. {_what_to_do()}")


def _what_to_do() -> str:
    return (
        f"Fetch the data set {_DATASET} of the Hugging Face hub, for example by: hf download {_DATASET} --repo-type "
        f"dataset --local-dir FOLDER; then give options.assets=FOLDER, or set {VARIABLE}=FOLDER where the simulators "
        f"run. FOLDER is the one that holds {', '.join(_PARTS)}. options.assets={HUB} fetches it now"
    )


def _cache_folder() -> Path:
    """Returns hf-libero's cache folder."""
    return Path.home() / ".cache" / "libero" / "assets"


def _downloaded() -> Path:
    folder = _cache_folder()
    if not all((folder / part).is_dir() for part in _PARTS):
        try:
            hub = importlib.import_module("huggingface_hub")
            hub.snapshot_download(repo_id=_DATASET, repo_type="dataset", local_dir=str(folder))
        except Exception as error:  # hub, network and disk raise different errors
            raise EnvError(
                f"options.assets={HUB}: {_DATASET} could not be downloaded ({type(error).__name__}: {error}). "
                f"{_what_to_do()}"
            ) from error
    return assets_folder(str(folder))
