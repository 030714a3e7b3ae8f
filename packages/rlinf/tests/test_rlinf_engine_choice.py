"""`rollout.engine: auto`: the candidates, what decides between them, and what is written down of it."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from rlinf import jobs
from rlinf.config.load import load_config, to_yaml
from rlinf.config.overrides import parse_overrides
from rlinf.config.reasoning import ReasoningConfig
from rlinf.errors import RunFailed, UserError
from rlinf.jobs.reasoning import engine_choice
from rlinf.jobs.reasoning.engine_choice import choose_engine
from rlinf.jobs.reasoning.job import ReasoningJob
from rlinf.loop import engine_probe
from rlinf.loop.engine_probe import EngineProbe
from rlinf.machine import InstalledGpu, Machine
from rlinf.run_folder import RunFolder

AUTO = ["--rollout.engine=auto", "--sft_warm_up=null"]
LAPTOP = Machine(num_cpus=2, memory_bytes=16 << 30)
SERVER = Machine(
    num_cpus=64, memory_bytes=512 << 30, gpus=(InstalledGpu(name="NVIDIA H100 80GB HBM3", memory_bytes=80 * 10**9),) * 2
)


def config_of(*overrides: str) -> ReasoningConfig:
    config = load_config("sort-grpo", parse_overrides([*AUTO, "--cluster.num_devices=2", *overrides]))
    assert isinstance(config, ReasoningConfig)
    return config


@pytest.fixture
def everything_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine is installed here, and passes the checks that need its packages."""
    monkeypatch.setattr(engine_choice, "check_installed", lambda settings, where: None)
    monkeypatch.setattr(jobs, "prepare", lambda config, machine: object.__new__(ReasoningJob))


def probe(monkeypatch: pytest.MonkeyPatch, rates: dict[str, float], **others_s: float) -> list[str]:
    """Fakes the probes' tokens per second, of 32 prompts of a step of 64; 0: the engine dies. Returns the engines that
    are probed.

    Args:
        others_s: engine -> its seconds besides sampling.
    """
    probed: list[str] = []
    monkeypatch.setenv("RLINF_VENVS", "/nowhere")  # not those of this machine

    def measured(job: ReasoningJob, folder: RunFolder) -> EngineProbe:
        text = (folder.path / "config.yaml").read_text(encoding="utf-8")
        name = next(name for name in rates if f"engine: {name}\n" in text)
        probed.append(name)
        if not rates[name]:
            raise RunFailed("rollout/0 died\nlog ...")
        times = {"sampling_s": 3200 / rates[name], "other_s": others_s.get(name, 0.0)}
        return EngineProbe(num_prompts=32, step_prompts=64, num_tokens=3200, **times)

    monkeypatch.setattr(engine_probe, "probe_engine", measured)
    return probed


def test_with_one_engine_installed_it_is_that_one_and_nothing_is_measured(monkeypatch: pytest.MonkeyPatch):
    probed = probe(monkeypatch, {"huggingface": 1.0})
    job = jobs.prepare(config_of(), LAPTOP)
    assert job.config.rollout.engine == "huggingface" and not probed
    (note,) = job.config.notes
    assert note.startswith("rollout.engine=auto is huggingface: the only one that is possible here; not possible: ")
    assert "sglang: sglang is not installed" in note and "\n" not in note
    assert "engine: huggingface\n" in to_yaml(job.config)  # which is what a resumed run reads


@pytest.mark.usefixtures("everything_installed")
def test_without_derived_times_the_fastest_probe_decides(monkeypatch: pytest.MonkeyPatch):
    probed = probe(monkeypatch, {"huggingface": 2000.0, "sglang": 5000.0, "vllm": 0.0})
    config = choose_engine(config_of(), LAPTOP)
    assert config.rollout.engine == "sglang" and sorted(probed) == ["huggingface", "sglang", "vllm"]
    assert config.notes == (
        "rollout.engine=auto is sglang: sglang 1.28 s, huggingface 3.2 s (a step's sampling, weight sync and offload, "
        "measured over 32 of 64 prompts); not possible: vllm: rollout/0 died",
    )
    probe(monkeypatch, {"huggingface": 0.0, "sglang": 0.0, "vllm": 0.0})
    with pytest.raises(RunFailed, match="every engine failed in the probe"):
        choose_engine(config_of(), LAPTOP)


@pytest.mark.usefixtures("everything_installed")
def test_an_engine_that_leaves_its_devices_at_every_step_pays_for_it(monkeypatch: pytest.MonkeyPatch):
    probe(monkeypatch, {"huggingface": 2000.0, "sglang": 5000.0, "vllm": 0.0}, sglang=2.6, huggingface=0.1)
    config = choose_engine(config_of(), LAPTOP)
    assert config.rollout.engine == "huggingface" and "huggingface 3.3 s, sglang 3.88 s" in config.notes[0]


def test_the_seconds_of_a_step_are_those_of_its_tokens():
    """An engine that happened to draw longer completions is no slower for it."""
    one = EngineProbe(num_prompts=8, step_prompts=64, num_tokens=800, sampling_s=2.0, other_s=0.5)
    assert one.step_s(100.0) == 0.5 + 64 * 100 / 400
    longer = EngineProbe(num_prompts=8, step_prompts=64, num_tokens=1600, sampling_s=4.0, other_s=0.5)
    assert longer.step_s(100.0) == one.step_s(100.0)


@pytest.mark.usefixtures("everything_installed")
def test_an_engine_that_refuses_a_setting_is_no_candidate(monkeypatch: pytest.MonkeyPatch):
    probed = probe(monkeypatch, {"sglang": 1.0, "vllm": 2.0})
    config = choose_engine(config_of("--rollout.tensor_parallel_size=2", "--mode=collocated"), LAPTOP)
    assert config.rollout.engine == "vllm" and "huggingface" not in probed
    assert "huggingface: rollout.tensor_parallel_size=2: rollout.engine=huggingface computes on one" in config.notes[0]
    with pytest.raises(UserError, match=r"no engine is possible: huggingface: .*no option of that name"):
        choose_engine(config_of("--rollout.engine_options={enable_teleport: true}"), LAPTOP)


@pytest.mark.usefixtures("everything_installed")
def test_derived_steps_decide_between_engines_that_are_not_close(monkeypatch: pytest.MonkeyPatch):
    steps = {"huggingface": 3.0, "sglang": 2.0, "vllm": 2.1}
    monkeypatch.setattr(engine_choice, "reasoning_problem", lambda config, *_, **__: config.rollout.engine)
    planned = {name: SimpleNamespace(prediction=SimpleNamespace(step_s=step_s)) for name, step_s in steps.items()}
    monkeypatch.setattr(engine_choice, "best_plan", lambda name, modes: planned[name])
    probed = probe(monkeypatch, {"sglang": 10.0, "vllm": 20.0})
    config = choose_engine(config_of(), SERVER)
    assert config.rollout.engine == "vllm" and sorted(probed) == ["sglang", "vllm"]
    assert config.notes[0] == (
        "rollout.engine=auto is vllm: vllm 320 s, sglang 640 s (a step's sampling, weight sync and offload, measured "
        "over 32 of 64 prompts); sglang 2 s, vllm 2.1 s, huggingface 3 s (a step, derived for 2 x H100)"
    )
    planned["vllm"].prediction.step_s = 2.5
    probed.clear()
    assert choose_engine(config_of(), SERVER).rollout.engine == "sglang" and not probed


def test_the_choice_keeps_the_venv_that_has_the_engine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    from rlinf.venvs.folder import Stamp, Venv

    stamps = {"old": (False, True), "mine": (True, True), "of-gpus": (True, False)}
    there = [
        Venv(
            path=tmp_path / name,
            stamp=Stamp(name="vllm", cpu=cpu, python="3.11", list_sha256="", is_complete=whole),
        )
        for name, (whole, cpu) in stamps.items()
    ]
    monkeypatch.setattr(engine_choice, "venvs", lambda: iter(there))
    monkeypatch.setattr(engine_choice, "examine_venvs", lambda venvs: dict(venvs))

    def check_installed(settings: object, where: str | None) -> None:
        if where is None:
            raise UserError("not here")

    monkeypatch.setattr(engine_choice, "check_installed", check_installed)
    candidates, refused = engine_choice.installed_engines(config_of(), LAPTOP)
    assert {name: config.venvs for name, config in candidates.items()} == {"vllm": {"rollout": "mine"}}
    assert set(refused) == {"huggingface", "sglang"}


def test_an_unknown_engine_stays_an_error(refused):
    message = refused("train", "sort-grpo", "--rollout.engine", "auta")
    assert "no generation engine is called 'auta'" in message


@pytest.mark.parametrize(("limit_s", "num_prompts"), [(600.0, 12), (0.0, 8)], ids=["a whole step", "no time for one"])
def test_a_probe_measures_the_real_workers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit_s, num_prompts):
    monkeypatch.setattr(engine_probe, "PROBE_S", limit_s)
    job = jobs.prepare(config_of("--rollout.engine=huggingface", "--rollout.num_prompts=12", "--mode=collocated"))
    assert isinstance(job, ReasoningJob)
    with RunFolder(tmp_path / "run", config_yaml=to_yaml(job.config), command=[], keep_checkpoints=1) as folder:
        probe = engine_probe.probe_engine(job, folder)
    assert (probe.num_prompts, probe.step_prompts) == (num_prompts, 12)
    assert probe.num_tokens >= num_prompts * job.config.algorithm.group_size
    assert probe.sampling_s > 0 and probe.other_s > 0
