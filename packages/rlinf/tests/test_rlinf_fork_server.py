"""The process that workers are forked from: where there is one, and what it imports."""

import importlib.util
import json
from pathlib import Path

import pytest

from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.jobs.spec import job_spec
from rlinf.processes import fork_server
from rlinf_workers.plugins import ENGINES


def test_nothing_is_forked_where_there_may_be_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[str] = []
    monkeypatch.setattr(fork_server.forkserver, "ensure_running", lambda: started.append("server"))
    monkeypatch.setattr(fork_server.multiprocessing.util, "abstract_sockets_supported", True)
    monkeypatch.setattr(fork_server.multiprocessing, "set_forkserver_preload", lambda modules: None)
    monkeypatch.setattr(fork_server, "NVIDIA_DEVICE", Path("/dev/null"))
    assert not fork_server.start(load_config("sort-grpo"))
    assert started == []
    assert fork_server.start(load_config("sort-grpo", parse_overrides(["--cluster.device=cpu"])))
    assert started == ["server"]
    assert not fork_server.multiprocessing.util.abstract_sockets_supported, "every user could call such a socket"


def test_every_preloaded_module_exists(tmp_path: Path) -> None:
    """The server passes over what it cannot import, so a module that is gone would only make runs begin late."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    own = load_config("sort-grpo", parse_overrides([f"--model.path={tmp_path}", "--model.architecture=null"]))
    for engine in ENGINES.names():
        other = load_config("sort-grpo", parse_overrides([f"--rollout.engine={engine}"]))
        (module,) = [name for name in job_spec(other).preload(other) if name.startswith("rlinf_workers.engines.")]
        assert importlib.util.find_spec(module) is not None, module
    other = load_config("sort-grpo", parse_overrides(["--rollout.engine=rlinf_workers.testing.engines:Own"]))
    assert "rlinf_workers.testing.engines" in job_spec(other).preload(other)
    names = [
        name
        for config in (load_config("sort-grpo"), load_config("pushcube-ppo"), own)
        for name in job_spec(config).preload(config)
    ]
    assert {"transformers.models.qwen2.modeling_qwen2", "transformers.models.llama.modeling_llama"} <= set(names)
    for name in {*names, fork_server.FIRST}:
        assert importlib.util.find_spec(name) is not None, name
