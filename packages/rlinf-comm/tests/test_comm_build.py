"""The native build where CUDA is half there: AUTO goes on without it and says why, ON ends."""

import pathlib
import shutil
import subprocess

import pytest

ROOT = pathlib.Path(__file__).parents[3]


def configure(tmp_path: pathlib.Path, cuda: str) -> subprocess.CompletedProcess[str]:
    """Configures the repository with an nvcc that refuses the host compiler."""
    if shutil.which("cmake") is None or not (ROOT / "CMakeLists.txt").exists():
        pytest.skip("needs cmake and the repository")
    nvcc = tmp_path / "nvcc"
    nvcc.write_text(
        "#!/bin/sh\necho 'error: -- unsupported GNU version! gcc versions later than 1 are not' >&2\nexit 1\n"
    )
    nvcc.chmod(0o755)
    command = ["cmake", "-S", str(ROOT), "-B", str(tmp_path / "build"), "-DRLINF_BUILD_PYTHON=OFF"]
    command += [f"-DRLINF_CUDA={cuda}", f"-DCMAKE_CUDA_COMPILER={nvcc}"]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_auto_goes_on_without_a_cuda_compiler_that_refuses_the_host_compiler(tmp_path):
    for _ in range(2):  # also when it is configured again
        done = configure(tmp_path, "AUTO")
        assert done.returncode == 0, done.stderr
        assert "rlinf: CUDA sources OFF" in done.stdout
        assert f"building without CUDA, as the CUDA compiler {tmp_path / 'nvcc'} compiles nothing here" in done.stdout


def test_on_ends_with_the_reason(tmp_path):
    done = configure(tmp_path, "ON")
    assert done.returncode != 0
    text = " ".join(done.stderr.split())  # cmake breaks its lines
    assert "RLINF_CUDA=ON, but the CUDA compiler" in text and "compiles nothing here" in text and "CUDAHOSTCXX" in text
