"""The images: steps of Dockerfiles, fields of manifests, options of scripts, extras of the README agree."""

import importlib.util
import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[3]
DOCKERFILES = ("docker/Dockerfile", "docker/Dockerfile.cuda")


def read(path: str) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def instructions(path: str) -> list[tuple[str, list[str]]]:
    """The name and the words of each instruction of a Dockerfile."""
    text = re.sub(r"^#.*\n", "", read(path), flags=re.MULTILINE).replace("\\\n", " ")
    lines = [line.split(maxsplit=1) for line in text.splitlines() if line.strip()]
    return [(name, shlex.split(rest)) for name, rest in lines]


def ignored(path: str) -> bool:
    """Whether .dockerignore leaves a file or folder out; the last pattern that matches it, or a parent, decides."""
    parents = [path, *(str(parent) for parent in Path(path).parents if str(parent) != ".")]
    verdict = False
    for line in read(".dockerignore").splitlines():
        if line and not line.startswith("#") and any(Path(parent).match(line.lstrip("!")) for parent in parents):
            verdict = not line.startswith("!")
    return verdict


@pytest.mark.parametrize("path", DOCKERFILES)
def test_what_a_dockerfile_copies_exists_and_is_in_its_context(path: str):
    copies = [words[:-1] for name, words in instructions(path) if name == "COPY" and not words[0].startswith("--from")]
    sources = [source for words in copies for source in words]
    assert {"tools/image.sh", "packages"} <= set(sources)
    for source in sources:
        assert (ROOT / source).exists(), source
        assert not ignored(source), f".dockerignore leaves out {source}"
    copied = {Path(source).parent.name for source in sources if source.endswith("pyproject.toml")}
    assert copied == {path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")}


@pytest.mark.parametrize("path", DOCKERFILES)
def test_the_steps_of_a_dockerfile_are_scripts_with_these_options(path: str):
    scripts = [
        word for name, words in instructions(path) if name == "RUN" for word in words if word.startswith("tools/")
    ]
    assert set(scripts) == {"tools/image.sh"}
    options = re.findall(r"^  (\w+)\) ", read("tools/image.sh"), flags=re.MULTILINE)
    steps = re.findall(r"tools/image\.sh (\w+)", read(path).replace("tools/image.sh tools/", ""))
    assert {"system", "requirements", "packages"} <= set(steps) <= set(options)


@pytest.mark.parametrize("path", DOCKERFILES)
def test_an_image_does_not_run_as_root_and_its_stages_exist(path: str):
    stages: set[str] = set()
    for name, words in instructions(path):
        if name == "FROM":
            assert words[0] in stages or words[0] == "${BASE}"
            stages.add(words[2])
        elif name == "COPY" and words[0].startswith("--from="):
            assert words[0].removeprefix("--from=") in stages
    last_stage = read(path).split("\nFROM ")[-1]
    assert "\nUSER 1001\n" in last_stage


def test_the_scripts_that_the_images_share_are_valid_bash():
    for path in ("tools/environment.sh", "tools/image.sh", "cluster/slurm/train.sbatch"):
        subprocess.run(["bash", "-n", str(ROOT / path)], check=True)


def test_a_wrong_step_of_the_image_script_prints_the_steps():
    result = subprocess.run([ROOT / "tools/image.sh", "biuld", "venv"], capture_output=True, text=True, check=False)
    assert result.returncode == 2
    assert "usage: tools/image.sh system" in result.stderr


def test_the_compose_file_starts_a_cluster_of_its_two_nodes():
    services = yaml.safe_load(read("docker/compose.yaml"))["services"]
    assert set(services) == {"head", "worker"}
    for service in services.values():
        assert (ROOT / "docker" / service["build"]["context"] / service["build"]["dockerfile"]).is_file()
        assert service["environment"]["RAY_AUTH_MODE"] == "token"
        assert service["environment"]["RAY_AUTH_TOKEN"].startswith("${RAY_AUTH_TOKEN:?")  # no token is in the file
    script = services["head"]["command"][-1]
    options = yaml.safe_load(re.search(r"--cluster\.launcher_options '(.*)'", script)[1])  # type: ignore[index]
    assert options["num_nodes"] == len(services)
    assert options["address"] in services["worker"]["command"]
    assert f"--port {options['address'].partition(':')[2]} " in script


def test_the_devcontainer_builds_a_stage_that_exists():
    build = json.loads(read(".devcontainer/devcontainer.json"))["build"]
    assert (ROOT / ".devcontainer" / build["context"]).resolve() == ROOT
    dockerfile = (ROOT / ".devcontainer" / build["dockerfile"]).resolve().relative_to(ROOT)
    assert build["target"] in [words[2] for name, words in instructions(str(dockerfile)) if name == "FROM"]


def test_the_ray_cluster_has_a_token_and_the_ray_of_the_images():
    claim, cluster = yaml.safe_load_all(read("cluster/kuberay/raycluster.yaml"))
    spec = cluster["spec"]
    assert spec["authOptions"] == {"mode": "token"}
    assert f"ray=={spec['rayVersion']}" in read("tools/constraints.txt").split()
    (workers,) = spec["workerGroupSpecs"]
    for pod in (spec["headGroupSpec"]["template"]["spec"], workers["template"]["spec"]):
        assert pod["securityContext"]["runAsUser"] == 1001
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes["workspace"]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        mounts = [mount["name"] for container in pod["containers"] for mount in container["volumeMounts"]]
        assert sorted(mounts) == sorted(volumes)


def project(package: str) -> dict:
    tomllib = pytest.importorskip("tomllib", reason="Python 3.11")
    return tomllib.loads(read(f"packages/{package}/pyproject.toml"))["project"]


def test_the_readme_lists_exactly_the_extras():
    table = re.search(
        r"^\| extra \| adds \|\n\|.*\n((?:\|.*\n)+)", read("packages/rlinf/README.md"), flags=re.MULTILINE
    )
    assert table is not None
    rows = {row.split("|")[1]: row.split("|")[2] for row in table[1].splitlines()}
    names = [name for cell in rows for name in re.findall(r"`([\w-]+)`", cell)]
    options = project("rlinf")["optional-dependencies"]
    assert sorted(names) == sorted(options)
    in_all = set(re.findall(r"\[(.*?)\]", ",".join(options["all"])))
    chosen = {extra for group in in_all for extra in group.split(",")}
    assert set(re.findall(r"`([\w-]+)`", rows[" `all` "])) == chosen


def test_each_extra_of_rlinf_names_an_extra_that_exists():
    packages = [path.parent.name for path in ROOT.glob("packages/*/pyproject.toml")]
    extras = {name: set(project(name).get("optional-dependencies", {})) for name in packages}
    for name in packages:
        for line in [line for lines in project(name).get("optional-dependencies", {}).values() for line in lines]:
            sister = re.match(r"([\w-]+)\[([\w,-]+)\]", line)
            if sister and sister[1] in extras:
                assert set(sister[2].split(",")) <= extras[sister[1]], f"{name}: {line}"


def test_third_party_requirements_name_no_package_of_ours():
    pytest.importorskip("tomllib", reason="Python 3.11")
    spec = importlib.util.spec_from_file_location("third_party", ROOT / "tools/third_party.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    projects = module.read_projects()
    lines = module.third_party(projects, "rlinf", {"all"})
    assert not [line for line in lines if re.split(r"[\[<>=;!~ ]", line)[0] in projects]
    assert {"ray<3,>=2.60", "metaworld>=3.1.1"} <= lines
    with pytest.raises(ValueError, match=r"rlinf has no extra 'robots'; it has agents, agents-embeddings, "):
        module.third_party(projects, "rlinf", {"robots"})


@pytest.mark.parametrize(("answer", "extras"), [("true", "maniskill,metaworld,video"), ("false", "metaworld,video")])
def test_the_quickstart_leaves_maniskill_out_where_it_does_not_install(answer: str, extras: str):
    program = f"""
    source tools/environment.sh
    make_venv() {{ :; }}
    check_compiler() {{ :; }}
    pip_of() {{ echo "pip $*"; }}
    can_have_maniskill() {{ {answer}; }}
    install_everything
    """
    result = subprocess.run(["bash", "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert f"-e packages/rlinf-envs[{extras}] " in result.stdout
    assert ("without ManiSkill" in result.stdout) == (answer == "false")
