"""Runs the command line, as a user does in a process of its own, or in this process, which costs much less."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from listeners import nothing_exposed

_SCRIPT = Path(sys.executable).with_name("rlinf")
_PROGRAM = [sys.executable, "-c", "from rlinf.cli.main import entry_point; entry_point()"]
RLINF = [str(_SCRIPT)] if _SCRIPT.exists() else _PROGRAM  # an environment of a role has no scripts of ours
END_TIMEOUT_S = 600

SHORT_SORT = {
    "task.num_digits": 3,
    "task.num_held_out": 64,
    "model.architecture.hidden_size": 32,
    "model.architecture.intermediate_size": 64,
    "model.architecture.num_layers": 2,
    "sft_warm_up.max_steps": 40,
    "sft_warm_up.check_every": 40,
    "sft_warm_up.batch_size": 64,
    "sft_warm_up.target_accuracy": 1.0,
    "sft_warm_up.reuse": "false",
    "rollout.num_prompts": 16,
    "rollout.max_new_tokens": 4,
    "actor.micro_batch_groups": 2,
    "run.num_steps": 3,
    "run.evaluate_every": 2,
    "run.stop_at_score": "null",
}
"""The sorting job in seconds: three digits, a smaller model."""

TINY_SORT = SHORT_SORT | {
    "mode": "disaggregated",
    "cluster.num_devices": 2,
    "cluster.oversubscribe": "true",
    "sft_warm_up.max_steps": 5,
    "sft_warm_up.check_every": 5,
    "run.max_minutes": "null",
}
"""The same with hardly an SFT warm-up, on two slots of any machine: for many runs, or many steps."""

LONG_SORT = SHORT_SORT | {"run.num_steps": 14, "run.evaluate_every": 7}
"""Enough steps for mode auto to move, and for a worker to die between."""

SHORT_PUSH = {
    "actor.num_shards": 2,  # so that two ranks train
    "env.num_groups": 4,  # and two ranks simulate two groups each
    "run.num_steps": 2,
    "run.evaluate_every": 2,
    "run.stop_at_score": "null",
    "env.num_eval_episodes": 8,
    "env.num_steps": 20,
    "algorithm.num_minibatches": 2,
    "algorithm.num_epochs": 2,
    "env.max_episode_steps": 20,
}


def flags(overrides):
    return [part for key, value in overrides.items() for part in (f"--{key}", str(value))]


def training(recipe, output, overrides):
    """The arguments of `rlinf` that train; without a recipe they resume."""
    return ["train", *([str(recipe)] if recipe else ["--resume"]), "--output", str(output), *flags(overrides)]


def command(recipe, output, overrides):
    return [*RLINF, *training(recipe, output, overrides)]


def start(recipe, output, overrides):
    """A run in the background, in a process group of its own."""
    return subprocess.Popen(
        command(recipe, output, overrides),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
        start_new_session=True,
    )


def train(recipe, output, overrides, *, variables=(), on_network=False):
    """A run to its end; fails with what it printed, and where it could be reached from another machine.

    Args:
        variables: further env vars.
        on_network: it runs on a cluster that is meant to be reached.
    """
    env = environment() | dict(variables)
    with nullcontext() if on_network else nothing_exposed(env):
        done = subprocess.run(
            command(recipe, output, overrides), capture_output=True, text=True, env=env, timeout=END_TIMEOUT_S
        )
    assert done.returncode == 0, done.stdout + done.stderr
    return Path(output)


def train_here(recipe, output, overrides):
    """A run to its end in this process. Its workers are forked from the fork server of the first such run.

    Neither an interpreter nor a fork server imports torch for it. Only `train` looks at what listens.
    """
    assert rlinf(*training(recipe, output, overrides)).returncode == 0
    return Path(output)


def train_and_kill(recipe, output, overrides, victim, *, after_step):
    """A run in this process, of which a thread kills a worker once so many steps are done.

    Returns: what the command line returned; worker name -> its process when one was killed.
    """
    is_over = threading.Event()

    def kill():
        while not is_over.wait(0.02):
            if steps_done(output) >= after_step:
                workers = worker_processes(output)
                os.kill(workers[victim], signal.SIGKILL)
                return workers
        pytest.fail(f"the run ended before step {after_step}")

    with ThreadPoolExecutor(1) as pool:
        killing = pool.submit(kill)
        try:
            done = rlinf(*training(recipe, output, overrides))
        finally:
            is_over.set()
        return done, killing.result()


def rlinf(*arguments):
    """A command line in this process, as `subprocess.run` would return it. What it prints is printed here, too."""
    from rlinf.cli.main import main

    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        code = main([str(argument) for argument in arguments])
    print(out.getvalue(), err.getvalue(), sep="\n")
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def environment():
    return os.environ | {"OMP_NUM_THREADS": "1"}


def rows(path, name="metrics.jsonl"):
    """Rows of a run without what depends on the clock."""
    lines = [json.loads(line) for line in (Path(path) / name).read_text().splitlines()]
    return [
        {"step": row["step"]}
        | {key: value for key, value in row["metrics"].items() if not key.startswith(("time/", "perf/"))}
        for row in lines
    ]


def last_checkpoint(path):
    return max((Path(path) / "checkpoints").iterdir())


def tensors(folder, stem="model"):
    """The tensors of a folder, whichever files they are shared out over."""
    from safetensors.torch import load_file

    return {
        name: tensor
        for file in sorted(Path(folder).glob(f"{stem}*.safetensors"))
        for name, tensor in load_file(file).items()
    }


def weights(path):
    """The bytes of every tensor of the last checkpoint, optimizer included."""
    folders = {file.parent for file in last_checkpoint(path).rglob("*.safetensors")}
    return {
        f"{folder.relative_to(last_checkpoint(path))}/{stem}:{name}": tensor.numpy().tobytes()
        for folder in folders
        for stem in ("model", "optimizer")
        for name, tensor in tensors(folder, stem).items()
    }


def numbers(path):
    """All that has to be equal of two runs that are to be."""
    return rows(path), rows(path, "evaluations.jsonl"), weights(path)


def logged_processes(path):
    """Worker name -> ids of all its processes so far, from the first lines in its log."""
    pids = {}
    for log in (Path(path) / "logs").glob("*/*.log"):
        text = log.read_text(errors="replace")
        if firsts := re.findall(r"^worker \S+, process (\d+),", text, flags=re.MULTILINE):
            pids[f"{log.parent.name}/{log.stem}"] = [int(first) for first in firsts]
    return pids


def worker_processes(path):
    """Worker name -> id of its newest process."""
    return {name: processes[-1] for name, processes in logged_processes(path).items()}


def wait_for(condition, process, what):
    """Polls until the condition holds; fails when the process ends before."""
    deadline = time.monotonic() + END_TIMEOUT_S
    while not condition():
        if process.poll() is not None:
            out, err = process.communicate()
            pytest.fail(f"the run ended with {process.returncode} before {what}:\n{out}\n{err}")
        assert time.monotonic() < deadline, f"no {what}"
        time.sleep(0.02)


def steps_done(path):
    file = Path(path) / "metrics.jsonl"
    return len(file.read_text().splitlines()) if file.exists() else 0


def is_running(pid):
    """A zombie has ended; only its parent has not looked yet."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def all_gone(pids):
    deadline = time.monotonic() + 30
    while any(map(is_running, pids)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not any(map(is_running, pids))


def refusal(*arguments: str, out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """Runs a command line that must be refused before it makes its folder; returns the message."""
    from rlinf.cli.main import main

    code = main([*arguments, "--output", str(out)])
    stdout, err = capsys.readouterr()
    assert (code, stdout) == (2, ""), err
    assert not out.exists()
    assert err.startswith("error: ") and len(err.splitlines()) <= 3
    return err.removeprefix("error: ")
