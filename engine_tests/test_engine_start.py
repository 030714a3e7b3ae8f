"""An engine `sglang` that cannot start says why on one screen; one whose worker dies leaves nothing behind."""

import dataclasses
import gc
import json
import os
import subprocess
import sys
import textwrap
import time

import psutil
import pytest
import torch
import zmq.asyncio  # pyright: ignore[reportMissingImports]

from listeners import nothing_exposed  # pyright: ignore[reportMissingImports]
from rlinf_workers import WorkersError
from rlinf_workers.engines.sglang import engine as engine_module
from rlinf_workers.testing import engines

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return engines.tiny_model(tmp_path_factory.mktemp("model"))


def test_a_model_that_sglang_does_not_serve_is_refused_before_anything_starts(model, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NobodyForCausalLM"]}))
    with pytest.raises(WorkersError, match="SGLang does not implement NobodyForCausalLM"):
        engine_module.check_architecture(tmp_path)
    engine_module.check_architecture(engine_module.Path(model.folder))


def test_another_version_is_refused_with_those_that_are_known(model, monkeypatch):
    other = dataclasses.replace(engine_module.SPEC, known_versions=("0.1.2",))
    monkeypatch.setattr(engine_module, "SPEC", other)
    with pytest.raises(WorkersError, match=r"is installed; known to work: 0\.1\.2\..*any_version=true"):
        engine_module.SGLangEngine(model, CPU, max_prompt_tokens=8)


def test_the_names_that_a_config_is_checked_against_are_those_of_this_version():
    from sglang.srt.server_args import ServerArgs  # pyright: ignore[reportMissingImports]

    from rlinf_workers.engines.sglang.options import ARGUMENTS

    names = {name for name in ServerArgs.__struct_fields__ if not name.startswith("_")}
    assert ARGUMENTS.names == names


def test_names_and_values_that_sglang_does_not_take_are_its_users(model):
    with pytest.raises(WorkersError, match="did you mean mem_fraction_static"):
        engine_module.SGLangEngine(model, CPU, max_prompt_tokens=8, mem_fraction_statik=0.5)
    with pytest.raises(
        WorkersError, match=r"SGLang did not start: .*attention(.|\n)*engine_options\.attention_backend=nonsense"
    ):
        engine_module.SGLangEngine(model, CPU, max_prompt_tokens=8, attention_backend="nonsense")
    children = psutil.Process().children(recursive=True)
    assert all("resource_tracker" in " ".join(child.cmdline()) for child in children)
    contexts = [one for one in gc.get_objects() if isinstance(one, zmq.asyncio.Context)]
    assert all(one.closed for one in contexts), "ZeroMQ would wait for ever when an open one is collected"


WORKER = """
    import sys, torch
    from dataclasses import replace
    from rlinf_workers.engines.sglang.engine import SGLangEngine
    from rlinf_workers.models import ModelSettings
    from rlinf_workers.testing import engines

    def main():
        model = ModelSettings(folder=sys.argv[1], has_weights=True)
        engine = SGLangEngine(model, torch.device("cpu"), max_prompt_tokens=8)
        print(*[process.pid for process in engine._server._processes], flush=True)
        sys.stdin.readline()

    if __name__ == "__main__":
        main()
"""


@pytest.fixture
def worker(model, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text(textwrap.dedent(WORKER))
    pipe = subprocess.PIPE
    env = dict(os.environ)
    with nothing_exposed(env):
        process = subprocess.Popen(
            [sys.executable, str(script), model.folder], stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=env
        )
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, process.communicate()[1]
        yield process, [int(pid) for pid in line.split()]
        process.kill()


def test_nothing_is_left_when_the_worker_is_killed(worker):
    process, children = worker
    process.kill()
    gone_within(children, 5.0)


def test_a_worker_that_nobody_asks_ends_with_its_engine_and_says_why(worker):
    process, (child,) = worker
    os.kill(child, 9)
    assert process.wait(timeout=30) == 1  # its input stays open: it waits for a line that never comes
    assert f"error: SGLang's scheduler process 0 of 1 (pid {child}) ended with signal 9" in process.stderr.read()


def gone_within(pids, seconds):
    deadline_s = time.monotonic() + seconds
    while any(psutil.pid_exists(pid) and psutil.Process(pid).status() != "zombie" for pid in pids):
        assert time.monotonic() < deadline_s, f"of {pids} some are left"
        time.sleep(0.05)
