"""The installed command, as a process: exit codes, streams, and what is not imported."""

import os
import subprocess
import sys
from pathlib import Path

COMMAND = [sys.executable, "-c", "from rlinf.cli.main import entry_point; entry_point()"]
HEAVY = ("torch", "transformers", "numpy", "ray", "gymnasium", "mani_skill", "tensorboard")

PROBE = """
import sys
from rlinf.cli.main import main
try:
    code = main(sys.argv[1:])
except SystemExit as end:
    code = end.code
print("IMPORTED", *sorted(name for name in sys.modules if "." not in name))
sys.exit(code)
"""


LOOKING = (
    "--help",
    "train --help",
    "plan --help",
    "eval --help",
    "config list",
    "config show sort-grpo",
    "config schema",
    "config explain algorithm.clip_high",
    "env --help",
    "explain --help",
    "explain {run}",
)
PROBE_OF_LINES = """
import sys
from rlinf.cli.main import main
for line in sys.argv[1:]:
    try:
        code = main(line.split())
    except SystemExit as end:
        code = end.code
    assert code == 0, line
print("IMPORTED", *sorted(name for name in sys.modules if "." not in name))
"""


def test_looking_at_recipes_and_runs_imports_nothing_heavy(tmp_path: Path):
    (tmp_path / "manifest.json").write_text('{"sessions": [{"started": "noon", "ended": null}]}')
    lines = [line.format(run=tmp_path) for line in LOOKING]
    done = subprocess.run(
        [sys.executable, "-c", PROBE_OF_LINES, *lines], capture_output=True, text=True, cwd=tmp_path, timeout=600
    )
    assert (done.returncode, done.stderr) == (0, "")
    imported = done.stdout.splitlines()[-1].split()[1:]
    assert "pydantic" in imported
    assert [name for name in HEAVY if name in imported] == []


def test_a_mistake_ends_with_2_before_anything_heavy_is_imported(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-c", PROBE, "train", "sort-grpo", "--seed", "x"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=600,
    )
    assert (done.returncode, done.stderr) == (2, "error: --seed='x'; allowed: a whole number\n")
    assert "torch" not in done.stdout.split()
    assert list(tmp_path.iterdir()) == []


MISTYPED = {
    "train sort-grpo --rollout.engine tgi": "rollout.engine=tgi: no generation engine is called 'tgi'",
    "train sort-grpo --rollout.engine absent:E": "the generation engine 'absent:E' cannot be imported: No module named",
    "train sort-grpo --actor.backend fsdp": "actor.backend=fsdp: no training backend is called 'fsdp'",
    "train sort-grpo --cluster.launcher slurm": "cluster.launcher: no launcher is called 'slurm'",
    "train sort-grpo --cluster.weight_sync nccl": "cluster.weight_sync: no weight sync is called 'nccl'",
    "train sort-grpo --venvs.rollout absent": "venvs.rollout: there is no venv 'absent'",
    "train sort-grpo --plan.profile absent.json": "/absent.json: No such file or directory",
    "train sort-grpo --algorithm.kl_coef 0.1 --reference.path absent": "/absent: does not exist",
    "train sort-grpo --reward.kind function --reward.path absent:f": "the reward 'absent:f' cannot be imported",
    "train pushcube-ppo --policy.name cn": "policy.name: no policy is called 'cn'; did you mean 'cnn'?",
    "train pushcube-ppo --env.kind import --env.id absent:E": "the environment 'absent:E' cannot be imported",
    "train pushcube-ppo --sft_warm_up.source lerobot --sft_warm_up.path x": "/x: No such file or directory",
    "eval gsm8k=absent.jsonl --model .": "/absent.jsonl: No such file or directory",
    "eval gsm8k=absent.jsonl --model . --engine tgi": "engine=tgi: no generation engine is called 'tgi'",
    "train gsm8k-grpo --model.path absent --task.train_files x --task.eval_files y": "/absent: does not exist",
    "train gsm8k-grpo --model.path a/absent --task.train_files x --task.eval_files y": "model.path=a/absent: ",
    "train gsm8k-grpo --model.path . --task.train_files a/absent --task.eval_files x": "task.train_files=a/absent: ",
    "train sort-grpo --reward.kind model --reward.path absent": "reward.path=",
    "train maniskill-openvla-ppo --policy.options.folder absent": "policy.options.folder=absent: No such file",
    "train libero-pi0-ppo --policy.options.folder a/absent": "policy.options.folder=a/absent: ",
    "train absent.yaml": "absent.yaml: No such file or directory",
    "train --resume --output absent": "nothing to resume, there is no such folder",
    "play absent": "absent does not exist",
    "export absent --output x": "absent does not exist",
    "eval gsm8k=absent.jsonl --model absent": "/absent: does not exist",
    "eval gsm8k --model a/absent": "model=a/absent: ",
    "eval --suite metaworld-ood absent": "absent does not exist",
    "profile gsm8k-grpo --model.path absent --task.train_files x --task.eval_files x": "/absent: does not exist",
    "data absent.jsonl": "absent.jsonl: No such file or directory",
    "report absent": "there is no run folder absent",
    "explain absent": "absent is not the folder of a run",
    "config explain num_generation": "did you mean algorithm.group_size",
    "check sort-grpo --rollout.engine tgi": "rollout.engine=tgi: no generation engine is called 'tgi'",
    "profile sort-grpo --rollout.engine tgi": "rollout.engine=tgi: no generation engine is called 'tgi'",
}
"""Command line -> part of its answer."""


def test_mistyped_names_and_paths_are_answered_before_torch_is_imported(tmp_path: Path):
    program = (
        "import sys; from rlinf.cli.main import main\n"
        "for line in sys.argv[1:]: print(main(line.split()), 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *MISTYPED],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=120,
        env={**os.environ, "HF_HUB_OFFLINE": "1"},
    )
    assert done.stdout.splitlines() == ["2 False"] * len(MISTYPED)
    answers = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert [(line, text) for line, text in zip(MISTYPED, answers, strict=True) if MISTYPED[line] not in text] == []
    assert list(tmp_path.iterdir()) == []


def test_the_entry_point_gives_the_exit_code_and_tells_a_term_from_an_interrupt(tmp_path: Path):
    program = (
        "import os, signal; from rlinf.cli import config_command, main\n"
        "config_command.shipped_recipes = lambda: os.kill(os.getpid(), signal.SIGTERM)\n"
        "main.entry_point()"
    )
    environment = {**os.environ, "PYTHONWARNINGS": "error"}
    done = subprocess.run([*COMMAND, "config", "show"], capture_output=True, text=True, cwd=tmp_path, timeout=600)
    assert (done.returncode, done.stdout) == (2, "")
    done = subprocess.run(
        [sys.executable, "-c", program, "config", "list"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=600,
        env=environment,
    )
    assert (done.returncode, done.stderr) == (143, "interrupted; nothing is left running\n")
