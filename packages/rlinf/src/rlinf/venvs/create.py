"""Creates a venv: installs the packages of its list, rlinf's packages and the stand-ins, and tests its imports.

The folder counts as a venv only after all of that; after an error it is deleted, and if even that fails, its stamp
marks it as incomplete.
"""

from __future__ import annotations

import subprocess
from dataclasses import replace
from pathlib import Path

from rlinf.console.live_line import LiveLine
from rlinf.errors import RunFailed, UserError
from rlinf.venvs import pip
from rlinf.venvs.catalog import RequirementList, kind_named, requirement_list, variant
from rlinf.venvs.examine import probe
from rlinf.venvs.folder import Stamp, Venv, discard, held, read_stamp, venvs_folder, write_stamp
from rlinf.venvs.own_packages import install_own_packages, missing_packages, own_digests
from rlinf.venvs.python_build import PythonBuild, ask, choose, minor_of
from rlinf.venvs.stand_ins import install_stand_in
from rlinf_envs import VenvSpec
from rlinf_workers.launchers import clean_env_vars

CPU_TORCH_HINT = (
    "the list wants a build of torch for CPUs, whose version ends in +cpu; where pip does not find it, tell pip of "
    "PyTorch's CPU index: PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu"
)

NUM_LATER_STEPS = 3
"""Steps of the progress bar after the packages: rlinf's packages, the imports, the stamp."""


def create(name: str, *, cpu: bool, python: str | None, console: LiveLine) -> Venv:
    """Creates a venv, or updates rlinf's packages in an existing one.

    Args:
        name: a name in catalog.KINDS.
        cpu: for CPU slots: a torch without CUDA, and stand-ins for GPU-only packages.
        python: path or command of the interpreter; None selects one.
        console: shows the progress.

    Raises: UserError if the name, the variant, the interpreter or an existing venv does not fit; RunFailed if pip or an
    import fails.
    """
    kind = kind_named(name)
    listed = requirement_list(name, cpu=cpu)
    path = venvs_folder() / name
    with held(path, f"rlinf venv create {variant(name, cpu=cpu)}") as lock:
        for note in lock.notes:
            console.message(note)
        stamp = read_stamp(path)
        if stamp is not None and stamp.is_complete:
            return _renew(Venv(path=path, stamp=stamp), listed, cpu=cpu, python=python, console=console)
        if stamp is None and path.exists() and any(path.iterdir()):
            raise UserError(f"{path} is there and was not made by rlinf venv create", hint="move it away")
        if stamp is not None:
            console.message(f"{path}: its making was cut short; it is made anew")
        chosen = choose(python, listed.pythons, what=variant(name, cpu=cpu))
        own = own_digests()
        discard(path)
        try:
            return _make(path, kind, listed, chosen, own, cpu=cpu, console=console)
        except BaseException:
            discard(path)
            raise


def _renew(venv: Venv, listed: RequirementList, *, cpu: bool, python: str | None, console: LiveLine) -> Venv:
    """Updates rlinf's packages in an existing venv, if they changed."""
    stamp, path = venv.stamp, venv.path
    title = variant(stamp.name, cpu=cpu)
    anew = f"rlinf venv remove {stamp.name} && rlinf venv create {title}"
    if stamp.cpu != cpu:
        raise UserError(f"{path} is there, made as {venv.title}", hint=anew)
    if python is not None and not stamp.python.startswith(f"{ask(python).minor}."):
        raise UserError(f"{path} is there with Python {stamp.python}, not with that of --python {python}", hint=anew)
    if stamp.list_sha256 != listed.sha256:
        raise UserError(f"{path} is out of date: the list of {title} has changed since it was made", hint=anew)
    own, inside = own_digests(), _still_there(venv, anew)
    if stamp.own_packages == own and not missing_packages(inside):
        console.message(f"{path} is there and up to date")
        return venv
    console.message(f"{path} is there; rlinf's own packages in it are not those here and are renewed")
    write_stamp(path, replace(stamp, own_packages={}))  # so that a partial update does not count as up to date
    install_own_packages(inside, collecting=lambda name: None)
    renewed = Venv(path=path, stamp=replace(stamp, own_packages=own))
    write_stamp(path, renewed.stamp)
    return renewed


def _still_there(venv: Venv, anew: str) -> PythonBuild:
    """Returns its interpreter. Raises: UserError if that is gone or has another minor version, which cannot use its
    packages."""
    try:
        inside = ask(venv.python)
    except UserError as error:
        raise UserError(error.message, hint=anew) from error
    if inside.minor != minor_of(venv.stamp.python):
        text = f"{inside.path} is Python {inside.version} now; the venv was made with {venv.stamp.python}"
        raise UserError(text, hint=anew)
    return inside


def _make(
    path: Path,
    kind: VenvSpec,
    listed: RequirementList,
    chosen: PythonBuild,
    own: dict[str, str],
    *,
    cpu: bool,
    console: LiveLine,
) -> Venv:
    """Creates a venv in a new folder."""
    stamp = Stamp(name=kind.name, cpu=cpu, python=chosen.version, list_sha256=listed.sha256)
    path.mkdir()
    write_stamp(path, stamp)
    console.message(f"{path}: {variant(kind.name, cpu=cpu)} with Python {chosen.version} ({chosen.path})")
    if listed.untried:
        console.message(f"the list of {variant(kind.name, cpu=cpu)} was {listed.untried}")
    _run([str(chosen.path), "-m", "venv", str(path)])
    venv = Venv(path=path, stamp=stamp)
    _install_list(venv, listed, console)
    num_packages = len(listed.versions)
    num_steps = num_packages + NUM_LATER_STEPS
    console.show("installing rlinf's own packages, as they are here", num_packages + 1, num_steps)
    inside = ask(venv.python)
    install_own_packages(inside, collecting=lambda name: None)
    names = kind.cpu_stand_ins if cpu else ()
    stand_ins = tuple(install_stand_in(name, inside.site_packages) for name in names)
    for stand_in in stand_ins:
        console.message(f"stand-in {stand_in}: import-time names only, nothing in it computes")
    console.show(f"importing {', '.join(kind.modules)}", num_packages + 2, num_steps)
    probed = probe(venv.python, kind, cpu=cpu)
    if probed.failures:
        lines = "\n".join(f"  {module}: {why}" for module, why in probed.failures.items())
        raise RunFailed(f"{venv.title} was installed, and does not work:\n{lines}")
    whole = replace(stamp, own_packages=own, stand_ins=stand_ins, is_complete=True)
    write_stamp(path, whole)
    console.show(f"{venv.title} is whole", num_steps, num_steps)
    return Venv(path=path, stamp=whole)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, env=clean_env_vars(), capture_output=True, text=True, check=False)
    if done.returncode:
        raise RunFailed(f"{' '.join(command)} failed:\n{(done.stdout + done.stderr).strip()[-2000:]}")


def _install_list(venv: Venv, listed: RequirementList, console: LiveLine) -> None:
    num_wanted, num_seen = len(listed.versions), 0

    def collecting(name: str) -> None:
        nonlocal num_seen
        num_seen += bool(name)
        if name:
            console.show(name, min(num_seen, num_wanted), num_wanted + NUM_LATER_STEPS, stays=False)
        else:
            console.show(f"unpacking {num_wanted} packages", num_wanted, num_wanted + NUM_LATER_STEPS)

    console.message(f"fetching {num_wanted} packages")
    plain = [f"{name}=={version}" for name, version in listed.versions.items() if name not in listed.digests]
    locked = venv.path / listed.path.name  # pip requires digests for all entries of a file, or for none
    lines = listed.path.read_text(encoding="utf-8").splitlines()
    locked.write_text("".join(f"{line}\n" for line in lines if line not in plain), encoding="utf-8")
    try:
        if plain:
            pip.install(venv.python, ["--no-deps", *plain], collecting=collecting)
        if listed.digests:
            pip.install_locked(venv.python, locked, collecting=collecting, note=console.message)
    except RunFailed as error:
        if venv.stamp.cpu and "torch==" in str(error):
            raise RunFailed(f"{error}\nhint: {CPU_TORCH_HINT}") from None
        raise
