"""Installs the caller's versions of rlinf's packages into a venv.

Their installed files are copied, so no compiler, network or index is needed, and editable installs stay editable: their
files only refer to the checkout. Native modules fit one minor version of Python; for another one, pip installs the
packages with native modules, from the checkout (which needs a C++ compiler) or from its index.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import shutil
import subprocess
import sysconfig
from collections.abc import Callable
from importlib.metadata import Distribution, PackagePath
from pathlib import Path
from urllib.parse import unquote, urlsplit

from rlinf.doctor import FROM_WHEELS, OWN_PACKAGES
from rlinf.errors import UserError
from rlinf.venvs import pip
from rlinf.venvs.python_build import PythonBuild
from rlinf_workers.launchers import clean_env_vars

NATIVE_SUFFIX = ".so"


def own_digests() -> dict[str, str]:
    """Returns rlinf's package -> hex digest of the caller's files.

    Raises: UserError if one is not installed, as in a checkout on the path.
    """
    return {name: _digest(_distribution(name)) for name in OWN_PACKAGES}


def missing_packages(target: PythonBuild) -> list[str]:
    """Returns rlinf's packages that are missing in a venv."""
    installed = {dist.metadata["Name"] for dist in importlib.metadata.distributions(path=[str(target.site_packages)])}
    return [name for name in OWN_PACKAGES if name not in installed]


def install_own_packages(target: PythonBuild, *, collecting: Callable[[str], None]) -> None:
    """Replaces rlinf's packages in a venv by the caller's.

    Raises: RunFailed if pip cannot install a package with native code for the venv's Python.
    """
    if any(target.site_packages.glob("rlinf*.dist-info")):
        uninstall = ["-m", "pip", "--disable-pip-version-check", "uninstall", "--yes", *OWN_PACKAGES]
        subprocess.run([str(target.path), *uninstall], env=clean_env_vars(), capture_output=True, check=False)
    fits = target.extension_suffix == sysconfig.get_config_var("EXT_SUFFIX")
    for name in OWN_PACKAGES:
        own = _distribution(name)
        if fits or not any(path.name.endswith(NATIVE_SUFFIX) for path in _files(own)):
            _copy(own, target.site_packages)
        else:
            _install(own, target, collecting)


def _distribution(name: str) -> Distribution:
    try:
        return importlib.metadata.distribution(name)
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(
            f"{name} is not installed here, so nothing of it can go elsewhere", hint=f"{FROM_WHEELS} {name}"
        ) from error


def _files(own: Distribution) -> list[PackagePath]:
    """Returns its files below site-packages with a recorded digest; scripts are left out, because they are specific to
    one interpreter."""
    return [path for path in own.files or () if ".." not in path.parts and "__pycache__" not in path.parts]


def _digest(own: Distribution) -> str:
    entries = sorted(f"{path}={path.hash.value}" for path in _files(own) if path.hash is not None)
    return hashlib.sha256("\n".join([own.version, *entries]).encode()).hexdigest()


def _copy(own: Distribution, site_packages: Path) -> None:
    for path in _files(own):
        target = site_packages / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(str(own.locate_file(path)), target)


def _install(own: Distribution, target: PythonBuild, collecting: Callable[[str], None]) -> None:
    origin = json.loads(own.read_text("direct_url.json") or "{}")
    name = own.metadata["Name"]
    if origin.get("dir_info", {}).get("editable"):
        source = ["--editable", unquote(urlsplit(origin["url"]).path)]
        hint = f"native code is built for Python {target.version} here, which takes a C++ compiler: apt-get install g++"
    else:
        source = [f"{name}=={own.version}"]
        hint = (
            f"pip needs {name} {own.version} for Python {target.version}: a wheel, or its sdist and a C++ compiler; "
            "PIP_FIND_LINKS names a folder that has it"
        )
    pip.install(target.path, ["--no-deps", *source], collecting=collecting, hint=hint)
