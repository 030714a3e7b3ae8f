"""What `rlinf doctor` finds, on this machine and on ones that lack something."""

import dataclasses
import json
import os
import re
import resource
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from rlinf import doctor, machine
from rlinf.cli.main import main
from rlinf.doctor import Finding, examine
from rlinf_algos.rewards import SandboxRun
from rlinf_sched import host_memory


def test_the_command_lists_findings_as_lines_and_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [
        Finding(subject="cores", verdict="ok", text="2 x chip"),
        Finding(subject="disk", verdict="problem", text="full", hint="make room"),
    ]
    monkeypatch.setattr(doctor, "examine", lambda folder, config: iter(findings))
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["ok", "cores", "2", "x", "chip"],
        ["PROBLEM", "disk", "full"],
        ["->", "make", "room"],
        [],
        ["1", "problem", "found"],
    ]
    assert main(["doctor", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)[1] == {
        "subject": "disk",
        "verdict": "problem",
        "text": "full",
        "hint": "make room",
    }
    findings.pop()
    assert main(["doctor"]) == 0
    assert capsys.readouterr().out.endswith("no problems found\n")


def test_the_hand_over_is_tried_and_its_failure_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = doctor._hand_over()
    assert finding.verdict == "ok"
    monkeypatch.setattr(doctor, "_READER", "raise PermissionError('no way in')")
    (finding,) = doctor._hand_over()
    assert finding.verdict == "problem"
    assert "PermissionError: no way in" in finding.text


def test_the_mode_of_the_sandbox_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    run = SandboxRun(ending="exited", exit_code=0, stdout="", stderr="", cpu_s=0.0, weaknesses=())
    for weaknesses, verdict, text in (
        ((), "ok", "strong"),
        (("no namespaces", "x"), "note", "weak, .*: no namespaces; x"),
    ):
        result = dataclasses.replace(run, weaknesses=weaknesses)
        monkeypatch.setattr("rlinf_algos.rewards.run_python", lambda *arguments, result=result: result)
        (finding,) = doctor._sandbox()
        assert finding.verdict == verdict
        assert re.match(text, finding.text)


def test_a_check_that_raises_is_a_problem_and_the_others_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises
    monkeypatch.setattr(doctor, "_hand_over", lambda: iter(()))
    monkeypatch.setenv("RLINF_VENVS", str(tmp_path))
    findings = list(examine(tmp_path))
    broken = next(finding for finding in findings if finding.subject == "torch")
    assert broken.verdict == "problem"
    assert "torch" in broken.text
    assert findings[-1].subject == "videos"


def test_a_gpu_that_torch_cannot_use_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(machine, "NVIDIA_DEVICE", Path("/dev/null"))
    gpu = list(doctor._torch())[-1]
    assert (gpu.subject, gpu.verdict) == ("GPU", "problem")
    monkeypatch.setattr(machine, "NVIDIA_DEVICE", Path("/dev/none"))
    gpu = list(doctor._torch())[-1]
    assert (gpu.subject, gpu.verdict) == ("GPU", "note")
    assert f"up to {len(os.sched_getaffinity(0))} of them" in gpu.text


def test_missing_packages_come_with_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    installed = {name: "1.2" for name in (*doctor.OWN_PACKAGES, "imageio-ffmpeg") if name != "rlinf-sched"}
    monkeypatch.setattr(doctor, "installed_packages", lambda: installed)
    present, missing = doctor._packages()
    assert "rlinf-workers 1.2" in present.text
    assert (missing.verdict, missing.hint) == ("problem", f"{doctor.FROM_WHEELS} rlinf-sched")
    assert doctor._video().verdict == "note"
    installed["ImageIO"] = "2.38.1"  # as imageio has called itself since 2.38
    assert doctor._video() == Finding("videos", "ok", "imageio 2.38.1, imageio-ffmpeg 1.2")


def test_one_core_and_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    assert doctor._cores().verdict == "note"
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 4096))
    finding = doctor._open_files()
    assert (finding.verdict, finding.hint) == ("problem", "ulimit -n 4096")


def test_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finding = doctor._disk(tmp_path / "not" / "yet")
    assert finding.text.endswith(f"free in {tmp_path}")
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 30))
    assert doctor._disk(tmp_path).verdict == "note"
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert doctor._disk(tmp_path).verdict == "problem"


def test_a_container_s_memory_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "usable_bytes", lambda: 1 << 30)
    (finding,) = doctor._memory()
    assert finding.verdict == "note"
    assert "1.0 GiB" in finding.text
