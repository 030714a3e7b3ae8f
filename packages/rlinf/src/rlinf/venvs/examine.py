"""Checks a venv: tests imports, and compares versions with the list and with the caller's."""

from __future__ import annotations

import json
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from rlinf.errors import UserError
from rlinf.finding import Finding
from rlinf.venvs.catalog import KINDS, RequirementList, requirement_list
from rlinf.venvs.folder import Venv
from rlinf.venvs.own_packages import own_digests
from rlinf.venvs.python_build import minor_of
from rlinf_envs import VenvSpec
from rlinf_workers.launchers import clean_env_vars

PROBE = Path(__file__).parent / "probe.py"
PROBE_TIMEOUT_S = 600
"""Timeout in seconds; the first import of a large package compiles it, which may take minutes."""
OWN_MODULES = ("torch", "rlinf_comm", "rlinf_sched", "rlinf_workers")
MAX_NAMES = 5


@dataclass(frozen=True, kw_only=True, slots=True)
class Probed:
    """Result of probing a venv."""

    python: str
    """Version of its interpreter, for example `3.11.7`."""
    failures: dict[str, str]
    """Module -> import error."""
    versions: dict[str, str]
    """Normalized name -> version of every distribution."""
    cuda: str | None
    """CUDA version of its torch."""


def examine(venv: Venv) -> Iterator[Finding]:
    """Yields findings about a venv; takes as long as its slowest import. A problem comes before its consequences."""
    stamp = venv.stamp
    if not stamp.is_complete:
        yield Finding(stamp.name, "problem", "its making was cut short", f"rlinf venv create {venv.title}")
        return
    try:
        kind, listed = KINDS[stamp.name], requirement_list(stamp.name, cpu=stamp.cpu)
    except (KeyError, UserError):
        text = f"this version of rlinf ships no list for {venv.title}"
        yield Finding(stamp.name, "problem", text, f"rlinf venv remove {stamp.name}")
        return
    try:
        probed = probe(venv.python, kind, cpu=stamp.cpu)
    except UserError as error:
        yield Finding("interpreter", "problem", str(error), _anew(venv))
        return
    if minor_of(probed.python) != minor_of(stamp.python):  # it cannot use the installed packages
        text = f"{venv.python} is Python {probed.python} now; the venv was made with {stamp.python}"
        yield Finding("interpreter", "problem", text, _anew(venv))
        return
    yield Finding("interpreter", "ok", f"Python {probed.python} ({venv.python})")
    if listed.untried:
        yield Finding("list", "note", listed.untried)
    own = _own(venv, probed)
    yield own
    yield _versions(venv, listed, probed)
    yield from _imports(venv, kind, probed)
    if own.verdict == "ok":  # otherwise that is the cause
        yield _protocols(venv)
    for stand_in in stamp.stand_ins:
        yield Finding("stand-in", "note", f"{stand_in}: import-time names only, nothing in it computes")


def probe(python: Path, kind: VenvSpec, *, cpu: bool) -> Probed:
    """Runs probe.py in the venv. Raises: UserError if the interpreter does not start or returns no answer."""
    variables = dict(kind.cpu_variables if cpu else {})
    command = [str(python), str(PROBE), *OWN_MODULES, *kind.modules]
    try:
        with tempfile.TemporaryDirectory() as empty:
            if kind.import_folder:
                variables[kind.import_folder] = empty
            done = subprocess.run(
                command,
                input=kind.import_answer,
                env=clean_env_vars(variables),
                capture_output=True,
                text=True,
                timeout=PROBE_TIMEOUT_S,
                check=False,
            )
        values = json.loads(done.stdout)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise UserError(f"{python} does not run: {error}") from error
    except ValueError as error:
        last_line = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        raise UserError(
            f"{python} ended with exit code {done.returncode} while it imported; it said: {last_line}"
        ) from error
    values["versions"] = {_normalized(name): version for name, version in values["versions"].items()}
    return Probed(**values)


def _imports(venv: Venv, kind: VenvSpec, probed: Probed) -> Iterator[Finding]:
    for module in (*OWN_MODULES, *kind.modules):
        if module in probed.failures:
            text = f"does not import: {probed.failures[module]}"
            yield Finding(module, "problem", text, _anew(venv))
    for name in (*kind.packages, "rlinf-workers", "rlinf-comm"):
        if version := probed.versions.get(_normalized(name)):
            cuda = f", CUDA {probed.cuda}" if probed.cuda else ", CPU only"
            yield Finding(name, "ok", version + (cuda if name == "torch" else ""))


def _versions(venv: Venv, listed: RequirementList, probed: Probed) -> Finding:
    """Compares installed versions with the list, because an upgraded package is the usual cause of problems."""
    if venv.stamp.list_sha256 != listed.sha256:
        return Finding("versions", "problem", "its list has changed since it was made", _anew(venv))
    other = [
        f"{name} {probed.versions.get(_normalized(name), 'is missing')} (listed: {version})"
        for name, version in listed.versions.items()
        if probed.versions.get(_normalized(name)) != version
    ]
    if other:
        more = f", and {len(other) - MAX_NAMES} more" if len(other) > MAX_NAMES else ""
        return Finding("versions", "problem", ", ".join(other[:MAX_NAMES]) + more, _anew(venv))
    return Finding("versions", "ok", f"all {len(listed.versions)} as listed")


def _own(venv: Venv, probed: Probed) -> Finding:
    subject, hint = "rlinf's own packages", f"rlinf venv create {venv.title} renews them"
    digests = own_digests()
    if missing := [name for name in digests if name not in probed.versions]:
        return Finding(subject, "problem", f"missing: {', '.join(missing)}", hint)
    differing = [name for name, digest in digests.items() if venv.stamp.own_packages.get(name) != digest]
    if differing:
        return Finding(subject, "problem", f"not the same as here: {', '.join(differing)}", hint)
    return Finding(subject, "ok", "the same as here")


def _protocols(venv: Venv) -> Finding:
    """Checks whether a run with the caller's packages could start its workers in the venv."""
    from rlinf_workers import InterpreterRefused
    from rlinf_workers.launchers import examine_interpreter as ask_for_protocols, own_protocols

    try:
        ask_for_protocols(venv.python)
    except InterpreterRefused as error:
        return Finding("protocols", "problem", str(error), f"rlinf venv create {venv.title} renews them")
    spoken = ", ".join(f"{name} {number}" for name, number in own_protocols().items())
    return Finding("protocols", "ok", f"the same as here: {spoken}")


def _anew(venv: Venv) -> str:
    name = venv.stamp.name
    return f"rlinf venv remove {name} && rlinf venv create {venv.title}"


def _normalized(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")
