"""Stand-ins for GPU-only packages that SGLang always imports, and vLLM for models that see.

On CPUs they do not call them: a stand-in only has the imported names, which raise an explanation when called.
`rlinf venv create --cpu` installs them with the version suffix `+rlinf.standin`, which manifests show too. Importing a
stand-in with a GPU build of torch is an error.

sgl_kernel/    for sglang-kernel: SGLang's CUDA kernels
torchvision/   for torchvision: image transforms of models that see; a wheel of it fits one build of torch
"""

from __future__ import annotations

import shutil
from pathlib import Path

VERSIONS = {"sglang-kernel": "0.4.10+rlinf.standin", "torchvision": "0.28.0+rlinf.standin"}
"""Distribution -> version of the replaced package, with a suffix."""
MODULES = {"sglang-kernel": "sgl_kernel", "torchvision": "torchvision"}
HERE = Path(__file__).parent


def install_stand_in(name: str, site_packages: Path) -> str:
    """Copies a stand-in into a venv; returns `NAME VERSION`.

    Raises: FileExistsError if the package is installed.
    """
    module, version = MODULES[name], VERSIONS[name]
    shutil.copytree(HERE / module, site_packages / module, ignore=shutil.ignore_patterns("__pycache__"))
    dist_info = site_packages / f"{name.replace('-', '_')}-{version}.dist-info"
    dist_info.mkdir()
    summary = f"Stand-in of rlinf for {name} on CPUs: import-time names only, nothing in it computes"
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nSummary: {summary}\n"
    (dist_info / "METADATA").write_text(metadata, encoding="utf-8")
    (dist_info / "INSTALLER").write_text("rlinf\n", encoding="utf-8")
    files = [path for folder in (site_packages / module, dist_info) for path in folder.rglob("*") if path.is_file()]
    record = [f"{path.relative_to(site_packages)},,\n" for path in [*files, dist_info / "RECORD"]]
    (dist_info / "RECORD").write_text("".join(sorted(record)), encoding="utf-8")
    return f"{name} {version}"
