"""`ulimit -v`: refused before anything heavy is imported, and named where something ran out of it later."""

import errno
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from rlinf import address_space, jobs
from rlinf.address_space import address_space_hint
from rlinf.cli.main import main
from rlinf.errors import RunFailed

RLINF = str(Path(sys.executable).with_name("rlinf"))
HINT = "hint: a process may have 5.0 GiB of address space here; ulimit -v unlimited lifts that"


@pytest.mark.parametrize(
    "command",
    [
        ["train", "sort-grpo", "--output", "run"],
        ["profile", "sort-grpo"],
        ["eval", "gsm8k=test.jsonl", "--model", "model", "--output", "run"],
    ],
)
def test_a_limit_under_which_no_library_loads_is_refused_on_one_screen(command, gsm8k_inputs: Path) -> None:
    before = sorted(gsm8k_inputs.rglob("*"))
    done = subprocess.run(
        [RLINF, *command],
        cwd=gsm8k_inputs,
        capture_output=True,
        text=True,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30)),
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "error: a process may have 1.0 GiB of address space here (ulimit -v); a run needs at least 4 GiB, most of "
        "which is mapped and never used",
        "hint: ulimit -v unlimited, in the shell or the job's script; to limit memory use a cgroup",
    ]
    assert sorted(gsm8k_inputs.rglob("*")) == before


def test_what_may_have_run_out_of_address_space_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    no_room = OSError(errno.ENOMEM, "Cannot allocate memory")
    lost = RunFailed("step 2: worker actor/0 on here was lost: killed by SIGABRT")
    assert address_space_hint(no_room) == ""
    monkeypatch.setattr(address_space, "limit_bytes", lambda: 5 << 30)
    for error in (no_room, MemoryError(), lost, RunFailed("DefaultCPUAllocator: can't allocate memory")):
        assert address_space_hint(error) == f"\n{HINT}"
    assert address_space_hint(RunFailed("the loss is NaN")) == ""


@pytest.mark.parametrize(
    "error", [OSError(errno.ENOMEM, "Cannot allocate memory"), MemoryError(), RunFailed("exited with code 1")]
)
def test_the_hint_ends_the_message_of_a_failed_run(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_):
        raise error

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(address_space, "limit_bytes", lambda: 5 << 30)
    monkeypatch.setattr(jobs, "run", fail)
    assert main(["train", "sort-grpo", "--output", "run"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == HINT
