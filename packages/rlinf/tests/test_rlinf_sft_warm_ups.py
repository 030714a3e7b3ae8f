"""Which SFT warm-ups are taken from an earlier run, and which are not."""

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import pytest

from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.config.reasoning import ReasoningConfig
from rlinf.jobs import sft_warm_ups
from rlinf.jobs.sft_warm_ups import SftWarmUps
from rlinf_workers.launchers import Interpreter

NONE: Mapping[str, Interpreter] = MappingProxyType({})


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "rlinf" / "sft-warm-ups"


def sft_warm_up(
    *overrides: str,
    num_ranks: int = 2,
    device: str = "cpu",
    venvs: Mapping[str, Interpreter] = NONE,
) -> SftWarmUps:
    config = load_config("sort-grpo", parse_overrides(list(overrides)))
    assert isinstance(config, ReasoningConfig)
    return SftWarmUps(config, num_ranks=num_ranks, device=device, venvs=venvs)


def keep(starts: SftWarmUps) -> None:
    with starts.keeping("mine", 0.375, {}) as folder:
        (folder / "weights").write_bytes(b"weights")


def test_a_kept_one_is_found_by_runs_that_would_make_the_same(cache: Path):
    assert sft_warm_up().find() is None
    keep(sft_warm_up())
    for same in ([], ["--name=other"], ["--run.num_steps=7"], ["--mode=hybrid"], ["--actor.learning_rate=1e-5"]):
        entry = sft_warm_up(*same).find()
        assert entry is not None, same
        folder, text = entry
        assert (folder / "weights").read_bytes() == b"weights"
        assert "a run of mine made on 20" in text and "0.375" in text and "--sft_warm_up.reuse false" in text


@pytest.mark.parametrize(
    "other",
    [
        ["--seed=1"],
        ["--task.num_digits=7"],
        ["--model.architecture.num_layers=2"],
        ["--model.dtype=bfloat16"],
        ["--sft_warm_up.max_steps=399"],
        ["--actor.num_shards=4"],
        ["--algorithm.name=ppo"],
        ["--cluster.threads_per_device=2"],
    ],
)
def test_what_decides_it_makes_another(other: list[str]):
    keep(sft_warm_up())
    assert sft_warm_up(*other).find() is None


def test_the_environment_of_a_role_decides_it_by_what_is_installed_there(tmp_path: Path):
    def rollout(torch: str) -> dict[str, Interpreter]:
        interpreter = Interpreter(
            path="/envs/x", python="3.11.9", packages={"torch": torch}, folders={"rlinf-comm": tmp_path}
        )
        return {"rollout": interpreter}

    keep(sft_warm_up(venvs=rollout("2.13.0")))
    assert sft_warm_up(venvs=rollout("2.13.0")).find() is not None
    assert sft_warm_up(venvs=rollout("2.12.0")).find() is None
    assert sft_warm_up().find() is None
    (tmp_path / "changed.py").write_text("1")
    assert sft_warm_up(venvs=rollout("2.13.0")).find() is None


def test_ranks_versions_and_source_decide_it_too(monkeypatch: pytest.MonkeyPatch):
    keep(sft_warm_up())
    assert sft_warm_up(num_ranks=1).find() is None
    assert sft_warm_up(device="cuda").find() is None
    with monkeypatch.context() as patch:
        patch.setattr(sft_warm_ups.importlib.metadata, "version", lambda name: f"another {name}")
        assert sft_warm_up().find() is None
    with monkeypatch.context() as patch:
        patch.setattr(sft_warm_ups, "_source_digest", lambda name: f"another {name}")
        assert sft_warm_up().find() is None
    assert sft_warm_up().find() is not None


def test_a_damaged_one_is_not_taken_and_an_old_one_goes(cache: Path):
    keep(sft_warm_up())
    (folder,) = (path for path in cache.iterdir() if path.is_dir())
    (folder / "weights").write_bytes(b"Weights")
    assert sft_warm_up().find() is None
    for seed in range(sft_warm_ups.NUM_KEPT + 2):
        keep(sft_warm_up(f"--seed={seed}"))
    assert len([path for path in cache.iterdir() if path.is_dir()]) == sft_warm_ups.NUM_KEPT
    assert sft_warm_up("--seed=0").find() is None and sft_warm_up(f"--seed={seed}").find() is not None


def test_one_of_another_user_is_not_taken(cache: Path, monkeypatch: pytest.MonkeyPatch):
    """Where several users share a cache."""
    keep(sft_warm_up())
    monkeypatch.setattr(os, "geteuid", lambda: cache.stat().st_uid + 1)
    assert sft_warm_up().find() is None and len(list(cache.glob("[!.]*"))) == 1


def test_it_can_be_switched_off_and_leaves_unknown_code_alone():
    assert sft_warm_up("--sft_warm_up.reuse=false").why_not == "sft_warm_up.reuse is false"
    own = sft_warm_up("--reward={kind: function, path: 'mine:score'}")
    assert own.why_not is not None and own.find() is None
