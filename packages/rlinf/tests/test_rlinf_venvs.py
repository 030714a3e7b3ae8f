"""`rlinf venv`: made from a list, looked after, refused where something does not fit; with a tiny list."""

import errno
import fcntl
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from rlinf import doctor
from rlinf.doctor import OWN_PACKAGES
from rlinf.errors import RunFailed, UserError
from rlinf.venvs import create, examine, folder, own_packages, pip, python_of, stand_ins
from rlinf.venvs.catalog import KINDS, read_list, requirement_list
from rlinf.venvs.python_build import ask
from rlinf_envs import VenvSpec
from rlinf_workers.plugins import ENGINES

MINOR = f"{sys.version_info[0]}.{sys.version_info[1]}"
TINY = VenvSpec(
    name="tiny", purpose="tests", folder=Path("unset"), modules=("tiny", "rlinf.errors"), packages=("tiny",)
)


def write_wheel(into: Path, version: str) -> None:
    """`tiny`, one module that imports."""
    dist_info = f"tiny-{version}.dist-info"
    files = {
        "tiny.py": f"__version__ = {version!r}\n",
        f"{dist_info}/METADATA": f"Metadata-Version: 2.1\nName: tiny\nVersion: {version}\n",
        f"{dist_info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in [*files, f"{dist_info}/RECORD"])
    with zipfile.ZipFile(into / f"tiny-{version}-py3-none-any.whl", "w") as wheel:
        for name, text in {**files, f"{dist_info}/RECORD": record}.items():
            wheel.writestr(name, text)


def write_list(lists: Path, *lines: str, python: str = MINOR) -> None:
    (lists / "requirements-cpu.txt").write_text("\n".join(["# A list of one.", f"# python: {python}", *lines]) + "\n")


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory):
    """`tiny` as the one environment that can be made, its list's folder, and a folder of environments."""
    root = tmp_path_factory.mktemp("venvs")
    lists, wheels = root / "lists", root / "wheels"
    lists.mkdir()
    wheels.mkdir()
    write_wheel(wheels, "1.0")
    write_list(lists, "tiny==1.0")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RLINF_VENVS", str(root / "made"))
        patch.setenv("PIP_NO_INDEX", "1")
        patch.setenv("PIP_FIND_LINKS", str(wheels))
        patch.setitem(KINDS, "tiny", replace(TINY, folder=lists))
        patch.setattr(examine, "OWN_MODULES", ())  # torch and numpy are not in the list
        yield root


@pytest.fixture
def empty(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same with no environment yet, and virtual environments without pip, which are made in no time."""
    monkeypatch.setenv("RLINF_VENVS", str(tmp_path / "made"))
    real = create._run
    monkeypatch.setattr(create, "_run", lambda command: real([*command, "--without-pip"]))
    monkeypatch.setattr(pip, "install", lambda *_, **__: None)
    return tmp_path / "made"


@pytest.fixture(scope="module")
def venv(tiny: Path) -> Path:
    """The environment, made by the command."""
    from rlinf.cli.main import main

    assert main(["venv", "create", "tiny", "--cpu"]) == 0
    return tiny / "made" / "tiny"


def test_the_list_and_rlinf_are_in_it_and_nothing_else(venv: Path):
    site = ask(venv / "bin" / "python").site_packages
    versions = {dist.metadata["Name"]: dist.version for dist in importlib.metadata.distributions(path=[str(site)])}
    assert versions.pop("pip")
    versions.pop("setuptools", None)  # ensurepip brings it up to Python 3.11
    assert versions == {"tiny": "1.0", **{name: importlib.metadata.version(name) for name in OWN_PACKAGES}}
    ours = importlib.metadata.distribution("rlinf-comm")
    (native,) = (path for path in ours.files or () if path.name.endswith(".so"))
    assert (site / native).read_bytes() == Path(str(ours.locate_file(native))).read_bytes()


def test_a_second_create_changes_nothing(rlinf, venv: Path):
    before = {path: path.stat().st_mtime_ns for path in venv.rglob("*") if "__pycache__" not in path.parts}
    outcome = rlinf("venv", "create", "tiny", "--cpu")
    assert (outcome.code, outcome.out.splitlines()[0]) == (0, f"{venv} is there and up to date")
    assert before == {path: path.stat().st_mtime_ns for path in venv.rglob("*") if "__pycache__" not in path.parts}


def test_it_is_listed_found_by_name_and_checked(rlinf, venv: Path):
    assert rlinf("venv", "list").out.split() == ["tiny", "--cpu", "Python", sys.version.split()[0], str(venv)]
    assert python_of("tiny") == python_of(venv) == venv / "bin" / "python"
    outcome = rlinf("venv", "check", "tiny")
    assert outcome.code == 0
    subjects = [line[9:].split()[0] for line in outcome.out.splitlines() if line.startswith("ok ")]
    assert subjects == ["interpreter", "rlinf's", "versions", "tiny", "rlinf-workers", "rlinf-comm", "protocols"]
    assert outcome.out.endswith("no problems found\n")
    (finding,) = doctor._venvs()
    assert (finding.subject, finding.verdict) == ("venv tiny", "ok")


def test_a_check_names_what_changed_in_it(rlinf, venv: Path):
    site = ask(venv / "bin" / "python").site_packages
    metadata, module = site / "tiny-1.0.dist-info" / "METADATA", site / "tiny.py"
    originals = metadata.read_text(), module.read_text()
    try:
        metadata.write_text(originals[0].replace("1.0", "2.0"))
        module.write_text("raise OSError('broken')")
        outcome = rlinf("venv", "check")
    finally:
        metadata.write_text(originals[0])
        module.write_text(originals[1])
    assert outcome.code == 1
    assert "does not import: OSError: broken" in outcome.out
    assert "tiny 2.0 (listed: 1.0)" in outcome.out


def test_the_doctor_says_in_one_line_what_is_wrong_and_what_to_do(venv: Path, tmp_path: Path):
    for gone, text in (
        ("lib/*/site-packages/tiny*", "versions: tiny is missing (listed: 1.0) (and 1 more: rlinf venv check tiny)"),
        ("bin/python", f"interpreter: {venv}/bin/python does not run: [Errno 2] "),
    ):
        moves = [(path, tmp_path / path.name) for path in venv.glob(gone)]
        assert moves
        for path, elsewhere in moves:
            path.rename(elsewhere)
        (finding,) = doctor._venvs()
        for path, elsewhere in moves:
            elsewhere.rename(path)
        assert (finding.subject, finding.verdict) == ("venv tiny", "problem")
        assert finding.text.startswith(text) and "\n" not in finding.text
        assert finding.hint == "rlinf venv remove tiny && rlinf venv create tiny --cpu"


def test_one_whose_interpreter_is_another_python_now_is_made_anew(rlinf, venv: Path):
    stamp = folder.read_stamp(venv)
    assert stamp is not None
    folder.write_stamp(venv, replace(stamp, python="3.99.7"))
    try:
        (finding,) = doctor._venvs()
        refusal = rlinf("venv", "create", "tiny", "--cpu")
    finally:
        folder.write_stamp(venv, stamp)
    assert finding.text.startswith(f"interpreter: {venv}/bin/python is Python {MINOR}.")
    assert finding.text.endswith("now; the venv was made with 3.99.7")
    assert finding.hint == "rlinf venv remove tiny && rlinf venv create tiny --cpu"
    assert refusal.code == 2 and "now; the venv was made with 3.99.7\nhint: rlinf venv remove" in refusal.err


def test_one_without_rlinf_is_said_and_mended(rlinf, venv: Path, tmp_path: Path):
    for path in ask(venv / "bin" / "python").site_packages.glob("*rlinf*"):
        path.rename(tmp_path / path.name)
    (finding,) = doctor._venvs()
    assert finding.text.startswith(f"rlinf's own packages: missing: {', '.join(OWN_PACKAGES)}")
    assert finding.hint == "rlinf venv create tiny --cpu renews them"
    assert rlinf("venv", "create", "tiny", "--cpu").code == 0
    (finding,) = doctor._venvs()
    assert finding.verdict == "ok"


def test_modules_that_ask_and_write_on_their_first_import_are_answered(rlinf, venv: Path, monkeypatch):
    module = ask(venv / "bin" / "python").site_packages / "tiny.py"
    original = module.read_text()
    asking = replace(KINDS["tiny"], import_folder="TINY_FOLDER", import_answer="n\n")
    module.write_text(
        "import os\nfolder = os.environ['TINY_FOLDER']\nassert input('elsewhere? ') == 'n' and not os.listdir(folder)\n"
        "open(os.path.join(folder, 'asked'), 'w').close()\n"
    )
    try:
        monkeypatch.setitem(KINDS, "tiny", asking)
        assert rlinf("venv", "check", "tiny").code == 0
        monkeypatch.setitem(KINDS, "tiny", replace(asking, import_answer=""))
        assert "does not import: EOFError" in rlinf("venv", "check", "tiny").out
    finally:
        module.write_text(original)


def test_a_check_says_where_a_run_from_here_could_not_start_workers(rlinf, venv: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("rlinf_workers.protocol.PROTOCOL", -1)
    outcome = rlinf("venv", "check", "tiny")
    assert outcome.code == 1
    assert "PROBLEM  protocols" in outcome.out and "against -1" in " ".join(outcome.out.split())


def test_one_from_an_older_list_is_out_of_date(rlinf, tiny: Path, venv: Path):
    stamp = folder.read_stamp(venv)
    write_list(tiny / "lists", "tiny==1.1")
    try:
        refusal, check = rlinf("venv", "create", "tiny", "--cpu"), rlinf("venv", "check", "tiny")
    finally:
        write_list(tiny / "lists", "tiny==1.0")
    assert refusal.code == 2
    assert "is out of date: the list of tiny --cpu has changed" in refusal.err
    assert "hint: rlinf venv remove tiny && rlinf venv create tiny --cpu" in refusal.err
    assert "its list has changed since it was made" in check.out
    assert folder.read_stamp(venv) == stamp


def test_another_rlinf_is_said_and_renewed(rlinf, venv: Path):
    stamp = folder.read_stamp(venv)
    assert stamp is not None
    folder.write_stamp(venv, replace(stamp, own_packages={**stamp.own_packages, "rlinf-algos": "other"}))
    site = ask(venv / "bin" / "python").site_packages
    (entry,) = (
        site / path for path in importlib.metadata.distribution("rlinf-algos").files or () if "METADATA" in str(path)
    )
    assert "not the same as here: rlinf-algos" in rlinf("venv", "check").out
    entry.write_text("old")
    outcome = rlinf("venv", "create", "tiny", "--cpu")
    assert "rlinf's own packages in it are not those here and are renewed" in outcome.out
    assert folder.read_stamp(venv) == stamp
    assert "Name: rlinf-algos" in entry.read_text()
    assert "no problems found" in rlinf("venv", "check").out


def test_native_code_for_another_python_is_installed_by_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    calls = []
    monkeypatch.setattr(pip, "install", lambda python, arguments, **_: calls.append(arguments))
    here = ask(sys.executable)
    other = replace(here, version="3.99.0", extension_suffix=".cpython-399.so", site_packages=tmp_path)
    own_packages.install_own_packages(other, collecting=print)
    named = {name for arguments in calls for name in ("rlinf-comm", "rlinf-sched") if name in arguments[-1]}
    assert named == {"rlinf-comm", "rlinf-sched"} and len(calls) == 2
    assert all(arguments[0] == "--no-deps" for arguments in calls)
    copied = {dist.metadata["Name"] for dist in importlib.metadata.distributions(path=[str(tmp_path)])}
    assert copied == set(OWN_PACKAGES) - named


def test_packages_of_wheels_are_copied_or_asked_of_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    here, there, calls = tmp_path / "here", tmp_path / "there", []
    dist_info = here / "rlinf_comm-9.9.dist-info"
    for file, text in (
        (here / "rlinf_comm" / "_C.so", "native"),
        (dist_info / "METADATA", "Metadata-Version: 2.1\nName: rlinf-comm\nVersion: 9.9\n"),
        (
            dist_info / "RECORD",
            "rlinf_comm/_C.so,sha256=x,6\nrlinf_comm-9.9.dist-info/METADATA,,\n../../../bin/x,sha256=y,1\n",
        ),
    ):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(own_packages, "OWN_PACKAGES", ("rlinf-comm",))
    monkeypatch.setattr(own_packages, "_distribution", lambda name: importlib.metadata.PathDistribution(dist_info))
    monkeypatch.setattr(pip, "install", lambda python, arguments, **_: calls.append(arguments))
    target = replace(ask(sys.executable), site_packages=there)
    own_packages.install_own_packages(replace(target, extension_suffix=".other.so"), collecting=print)
    assert calls == [["--no-deps", "rlinf-comm==9.9"]] and not there.exists()
    own_packages.install_own_packages(target, collecting=print)
    assert sorted(path.name for path in there.rglob("*") if path.is_file()) == ["METADATA", "_C.so"]
    assert len(calls) == 1


# -- what goes wrong ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", [0, 1])
def test_uv_installs_a_locked_list_and_pip_where_uv_cannot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int):
    uv = tmp_path / "uv"
    uv.write_text(f"#!/bin/sh\necho $@ > {tmp_path}/arguments\necho 'no such index' >&2\nexit {code}\n")
    uv.chmod(0o700)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    by_pip: list[list[str]] = []
    monkeypatch.setattr(pip, "install", lambda python, arguments, **_: by_pip.append(arguments))
    notes: list[str] = []
    pip.install_locked(Path("venv/bin/python"), Path("list.txt"), collecting=print, note=notes.append)
    arguments = "--no-deps --require-hashes -r list.txt"
    assert (tmp_path / "arguments").read_text() == f"pip install --quiet --python venv/bin/python {arguments}\n"
    assert by_pip == ([arguments.split()] if code else [])
    assert notes == (["uv could not install the list (no such index); pip does"] if code else [])


def test_pips_own_words_are_shown_where_it_fails(tmp_path: Path):
    arguments = ["--no-index", "--target", str(tmp_path), "rlinf-no-such-thing==1.0"]
    with pytest.raises(RunFailed, match=r"(?s)pip install failed.*No matching distribution.*\nhint: look there"):
        pip.install(Path(sys.executable), arguments, collecting=print, hint="look there")


@pytest.mark.parametrize(
    ("error", "code"),
    [(KeyboardInterrupt(), 130), (RunFailed("pip install failed"), 1), (OSError(28, "No space left on device"), 1)],
)
def test_a_creation_that_ends_early_leaves_nothing(
    rlinf, empty: Path, monkeypatch: pytest.MonkeyPatch, error, code: int
):
    seen = []

    def fail(python: Path, *_, **__):
        seen.append((python.exists(), [one.stamp.is_complete for one in folder.venvs()]))
        raise error

    monkeypatch.setattr(pip, "install", fail)
    assert rlinf("venv", "create", "tiny", "--cpu").code == code
    assert seen == [(True, [False])]
    assert [path.name for path in empty.iterdir()] == [".tiny.lock"]


def test_a_torch_for_cpus_that_pip_does_not_find_is_explained(rlinf, empty: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_, **__):
        raise RunFailed("pip install failed: No matching distribution found for torch==2.13.0+cpu")

    monkeypatch.setattr(pip, "install", fail)
    assert "\nhint: the list wants a build of torch for CPUs" in rlinf("venv", "create", "tiny", "--cpu").err


def test_a_creation_that_was_killed_does_not_count_and_is_made_anew(rlinf, empty: Path):
    (empty / "tiny").mkdir(parents=True)
    stamp = folder.Stamp(name="tiny", cpu=True, python="3.11.7", list_sha256="")
    folder.write_stamp(empty / "tiny", stamp)
    assert "its making was cut short" in rlinf("venv", "list").out
    assert "its making was cut short" in rlinf("venv", "check").out
    with pytest.raises(UserError, match=r"there is no venv 'tiny' in .*; there is none\nhint: rlinf venv create"):
        python_of("tiny")
    outcome = rlinf("venv", "create", "tiny", "--cpu")
    assert "its making was cut short; it is made anew" in outcome.out
    assert outcome.code == 1  # pip was kept from installing tiny
    assert "was installed, and does not work:\n  tiny: ModuleNotFoundError" in outcome.err
    assert not (empty / "tiny").exists()


def test_two_at_once_are_refused(rlinf, empty: Path):
    (empty / "tiny").mkdir(parents=True)
    folder.write_stamp(empty / "tiny", folder.Stamp(name="tiny", cpu=True, python="3.11.7", list_sha256=""))
    with folder.held(empty / "tiny", "rlinf venv create tiny --cpu"):
        for command in (("create", "tiny", "--cpu"), ("remove", "tiny")):
            error = rlinf("venv", *command).err
            assert f"{empty / 'tiny'} is in use: process {os.getpid()} on " in error
            assert "(rlinf venv create tiny --cpu)" in error and "--output" not in error
    assert (empty / "tiny").is_dir()
    assert rlinf("venv", "remove", "tiny").code == 0


def test_a_file_system_without_locks_is_said(rlinf, empty: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", fail)
    outcome = rlinf("venv", "create", "tiny", "--cpu")
    assert "has no locks: a second process could write it too" in outcome.out
    assert "was installed, and does not work" in outcome.err  # pip was kept from installing tiny


def test_a_list_that_nobody_has_tried_says_so(rlinf, tiny: Path, empty: Path):
    file = tiny / "lists" / "requirements-gpu.txt"
    file.write_text(f"# untried: only looked at\n# python: 3.9, {MINOR}\ntiny==1.0\n")
    try:
        outcome = rlinf("venv", "create", "tiny")
    finally:
        file.unlink()
    assert f"with Python {MINOR}" in outcome.out
    assert "the list of tiny was only looked at" in outcome.out


def test_names_and_variants_that_do_not_exist_are_refused(refused, empty: Path):
    assert refused("venv", "create", "sglan").startswith("there is no venv called 'sglan'\nhint: rlinf venv create ")
    text = refused("venv", "create", "tiny")
    assert text.startswith("no requirement list ships for tiny; there are lists for libero --cpu, libero, ")
    assert ", tiny --cpu, vllm --cpu, vllm\nhint: make a virtual environment by hand" in text
    assert "venvs: {rollout: /path/of/bin/python}" in text
    assert refused("venv", "check", "tiny").startswith(f"there is no venv 'tiny' in {empty}; there is none")


@pytest.mark.parametrize(
    ("python", "expected"),
    [
        ("/no/such/python", "--python /no/such/python: there is no such program"),
        ("/bin/ls", "/bin/ls is no Python that works: /bin/ls: cannot access"),
    ],
)
def test_an_interpreter_that_is_none_is_refused(rlinf, empty: Path, python: str, expected: str):
    outcome = rlinf("venv", "create", "tiny", "--cpu", "--python", python)
    assert outcome.code == 2 and outcome.err.startswith(f"error: {expected}")
    assert not (empty / "tiny").exists()


def test_another_python_than_the_lists_is_refused(rlinf, tiny: Path, empty: Path, monkeypatch: pytest.MonkeyPatch):
    write_list(tiny / "lists", "tiny==1.0", python="3.9")
    monkeypatch.setenv("PATH", "/nowhere")
    try:
        chosen = rlinf("venv", "create", "tiny", "--cpu", "--python", sys.executable).err
        default = rlinf("venv", "create", "tiny", "--cpu").err
    finally:
        write_list(tiny / "lists", "tiny==1.0")
    hint = "\nhint: rlinf venv create tiny --cpu --python /path/of/python3.9\n"
    assert f"tiny --cpu is for Python 3.9; {sys.executable} is Python {MINOR}" in chosen
    assert default == f"error: tiny --cpu is for Python 3.9, and there is no python3.9 on the path{hint}"


def test_only_what_rlinf_made_is_removed(rlinf, empty: Path):
    foreign = empty / "mine"
    (foreign / "work").mkdir(parents=True)
    assert "mine was not made by rlinf venv create" in rlinf("venv", "remove", "mine").err
    for name in ("..", "../..", "mine/work", ".tiny.lock", str(foreign)):
        assert rlinf("venv", "remove", name).code == 2
    assert (foreign / "work").is_dir()
    (empty / "linked").symlink_to(foreign)
    folder.write_stamp(foreign, folder.Stamp(name="mine", cpu=True, python="3.11.7", list_sha256=""))
    assert rlinf("venv", "remove", "linked").code == 2
    assert rlinf("venv", "remove", "mine").out == f"removed {foreign}\n"
    assert not foreign.exists()
    assert rlinf("venv", "remove", "mine").code == 2


def test_a_path_is_taken_as_it_is(tmp_path: Path):
    link = tmp_path / "bin" / "python"
    link.parent.mkdir()
    link.symlink_to(sys.executable)
    assert python_of(tmp_path) == python_of(str(link)) == link  # its target would be another environment
    with pytest.raises(UserError, match=r"no-python is no interpreter: it does not exist"):
        python_of(tmp_path / "no-python")
    (tmp_path / "text").write_text("")
    with pytest.raises(UserError, match=r"text is no interpreter: it cannot be executed"):
        python_of(f"{tmp_path}/text")


@pytest.mark.slow
def test_a_package_that_is_not_the_listed_one_is_not_installed(rlinf, tiny: Path, tmp_path: Path, monkeypatch):
    """It has the name and the version, but other content."""
    monkeypatch.setenv("RLINF_VENVS", str(tmp_path / "made"))
    wheel = (tiny / "wheels" / "tiny-1.0-py3-none-any.whl").read_bytes()
    monkeypatch.setitem(KINDS, "tiny", replace(TINY, folder=tmp_path))
    write_list(tmp_path, f"tiny==1.0 --hash=sha256:{hashlib.sha256(wheel + b'changed').hexdigest()}")
    outcome = rlinf("venv", "create", "tiny", "--cpu")
    assert outcome.code == 1 and "THESE PACKAGES DO NOT MATCH THE HASHES" in outcome.err
    assert not (tmp_path / "made" / "tiny").exists()
    write_list(tmp_path, f"tiny==1.0 --hash=sha256:{hashlib.sha256(wheel).hexdigest()}")
    assert rlinf("venv", "create", "tiny", "--cpu").code == 0


# -- what ships --------------------------------------------------------------------------------------------------------


def test_every_list_is_locked_and_as_its_recipe_says():
    script = Path(__file__).parents[3] / "tools" / "requirement_lists.py"
    spec = importlib.util.spec_from_file_location("requirement_lists", script)
    assert spec is not None and spec.loader is not None
    recipes = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = recipes  # its dataclasses look there
    spec.loader.exec_module(recipes)
    assert recipes.RECIPES.keys() == {
        f"{name}-{device}" for name in KINDS if name != "tiny" for device in ("cpu", "gpu")
    }
    for name in recipes.RECIPES:
        kind, is_cpu = KINDS[name.rpartition("-")[0]], name.endswith("-cpu")
        file = kind.requirements(cpu=is_cpu)
        listed = read_list(file)
        assert recipes.render(name, listed.versions, listed.digests) == file.read_text()
        assert all(listed.versions.values()) and bool(listed.untried) != is_cpu
        # First, so that pip ends at once where there is none for CPUs; any other build comes with gigabytes of CUDA.
        torch = next(iter(listed.versions))
        assert set(listed.versions) - set(listed.digests) == ({"torch"} if is_cpu else set())
        assert torch == "torch" and listed.versions[torch].endswith("+cpu") == is_cpu
        assert any(name.startswith("nvidia-cu") for name in listed.versions) != is_cpu
        assert {*kind.packages, "numpy", "transformers", "msgspec"} <= listed.versions.keys()
        assert (set(kind.cpu_stand_ins) & listed.versions.keys()) == (set() if is_cpu else set(kind.cpu_stand_ins))


def test_the_sglang_that_is_listed_is_one_that_the_engine_knows():
    for is_cpu in (True, False):
        assert requirement_list("sglang", cpu=is_cpu).versions["sglang"] in ENGINES.spec("sglang").known_versions


def test_stand_ins_say_what_they_are_and_compute_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    names = [stand_ins.install_stand_in(name, tmp_path) for name in KINDS["sglang"].cpu_stand_ins]
    assert names == ["sglang-kernel 0.4.10+rlinf.standin", "torchvision 0.28.0+rlinf.standin"]
    program = """if True:
        import json, sys, types
        torch = sys.modules["torch"] = types.ModuleType("torch")
        torch.version = types.SimpleNamespace(cuda=None, hip=None)
        import importlib.metadata as metadata
        import sgl_kernel
        from torchvision.io import ImageReadMode, decode_image
        from torchvision.transforms import InterpolationMode, functional
        from torchvision.transforms.v2 import functional as tvF
        assert tvF.InterpolationMode is InterpolationMode and InterpolationMode("bicubic") is InterpolationMode.BICUBIC
        said = []
        to_tensor, to_image = functional.pil_to_tensor, functional.to_pil_image
        for function in (sgl_kernel.copy_all_layer_kv_cache_cpu, decode_image, to_tensor, to_image):
            try:
                function(1, a=2)
            except NotImplementedError as error:
                said.append("stand-in" in str(error))
        torch.version.cuda = "13.0"
        for name in ("sgl_kernel", "torchvision"):
            del sys.modules[name]
            try:
                __import__(name)
            except ImportError as error:
                said.append("stand-in" in str(error))
        print(json.dumps([said, metadata.version("sglang-kernel"), metadata.version("torchvision")]))
    """
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [[True] * 6, "0.4.10+rlinf.standin", "0.28.0+rlinf.standin"]
