"""Runs whose policy writes hostile completions: does every run end with its last step, and what does judging cost?

A tiny model with random weights has a vocabulary of hostile pieces (`PIECES`, and `PROGRAMS` for the code reward),
each thousands of characters long, so that it samples texts that nobody thought of. Each kind of reward gets a whole
run. What judging costs is measured apart, by texts of the same pieces at one, two and four times the length, and by
texts of a million characters.

python -m benchmarks.failures.hostile_policy [--completions 2000] [--kinds exact,math]
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import report
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast, Qwen2Config

from rlinf.tasks.language import character_tokenizer
from rlinf_algos.rewards import exact_match, final_answer, multiple_choice, numeric_match, think_answer_format
from rlinf_algos.rewards.program import last_program

PIECES = (
    *(" ", "\n", "\t \n", "\x00", "\u200b", "\u0301", "\ufdfa", "\U0001d401", "a", "a ", "the answer is "),
    *("answer is A ", "Answer\n", "so it is ", "0=1=", "x=("),
    *("0", "9", "1,", "1,111", "1e5", "1/", "-", ".5", "9." , "x=1, ", "(A) ", "B or ", "\u7b54\u6848\u662f5\u3002"),
    *("{", "}", "{}", "(", "[", "$", "$$", "$1 ", "\\(", "\\[", "\\", "^{9", "2^", "!", "\\frac{", "\\frac{1}{2}"),
    *("\\sqrt{", "\\text{", "\\boxed{", "\\boxed{1}, ", "\\boxed{}", "\\begin{pmatrix}", "\\cup ", "\\int_0^{"),
    *("####", "#### 1\n", "#### a\n", "```", "```\n", "```python\n", "``` \n ```", "**"),
    *("<think>", "</think>", "<answer>", "</answer>", "</think><answer>", "<think></think><answer></answer>"),
)  # fmt: skip
"""Units that are repeated."""
SHORT = (
    "\\boxed{4}",
    "#### 4\n",
    "the answer is B.",
    "<answer>",
    "</answer>",
    "\\boxed{9^{9^{9^{9}}}}",
    "\\boxed{(10^7)!}",
    "\\boxed{0=1=2=3=4=5}",
    "\\boxed{" + "x=(" * 240 + "1" + ")" * 240 + "}",
    "\\boxed{5" + "!" * 400 + "}",
)
"""Pieces that stand once, so that there is an answer now and then."""
PROGRAMS = (
    "def f(x): return 10**400",
    "def f(x): return float('nan')",
    "def f(x): return 1.5",
    "def f(x): return f(x)",
    "def f(x):\n while True: pass",
    "def f(x): import time; time.sleep(10**6)",
    "def f(x): return '\\ud800' * 10**7",
    "def f(x): return [0] * 10**9",
    "def f(x):\n l = []\n for _ in range(10**5): l = [l]\n return l",
    "while True: print('x' * 10**6)",
    "import os\nwhile True: os.fork()",
    "import os\nfor pid in range(-1, 10**4):\n try: os.kill(pid, 9)\n except Exception: pass",
    "import ctypes; ctypes.string_at(0)",
    "import os; os._exit(0)",
    "open('full', 'wb').write(bytes(1 << 34))",
    "import sys; sys.setrecursionlimit(10**9); exec('(' * 10**6)",
    "x = '\x00'",
    "class A:\n __eq__ = lambda *_: True\ndef f(x): return A()",
    "def f(x): raise StopIteration",
    "import os, signal\nsignal.signal(signal.SIGCHLD, signal.SIG_IGN)\nwhile True:\n if os.fork() == 0:\n"
    "  for _ in range(10**6): pass\n  os._exit(0)\n try: os.wait()\n except OSError: pass",
    "import ctypes\nlibc = ctypes.CDLL(None)\nlibc.mmap.restype = ctypes.c_void_p\nfor i in range(1, 60000):\n"
    " place = libc.mmap(ctypes.c_void_p(i << 30), 4096, 1, 0x100022, -1, ctypes.c_long(0))\n"
    " ctypes.c_char.from_address(place).value",
)
"""Of `code`: also a fork whose time nobody waits for, and page tables, which no process has resident."""
ROWS = {
    "exact": ("exact", "4"),
    "multiple_choice": ("exact", "B"),
    "code": ("exact", json.dumps({"fn_name": "f", "inputs": [[1], [2]], "outputs": [1.5, 2.5]})),
}
"""Kind -> format and text of the answers; `#### 4` as GSM8K writes it for the others."""
REWARDS: dict[str, list[str]] = {
    "exact": [],
    "numeric": [],
    "format": [],
    "multiple_choice": [],
    "math": [],
    "length": ["--reward.free", "100", "--reward.limit", "100000"],
    "code": ["--reward.cpu_limit_s", "1", "--reward.wall_limit_s", "2", "--reward.allow_weak_isolation", "true"],
    "weighted": [
        *("--reward.terms.answer.weight", "0.9", "--reward.terms.answer.reward.kind", "math"),
        *("--reward.terms.form.weight", "0.1", "--reward.terms.form.reward.kind", "format"),
    ],
    "model": ["--reward.path", "judge", "--reward.batch_size", "8"],
}
"""Kind -> options; a path is below the folder of the run."""
JUDGES: dict[str, Callable[[str], object]] = {
    "exact": lambda text: exact_match(text, "4"),
    "numeric": lambda text: numeric_match(text, "4"),
    "format": lambda text: think_answer_format(text, ""),
    "multiple_choice": lambda text: multiple_choice(text, "B"),
    "math, the answer": final_answer,
    "code, the program": last_program,
}
"""What reads a whole completion, in this process."""
NUM_STEPS, GROUP_SIZE, NUM_TOKENS = 5, 20, 12
NUM_TEXTS = 10
"""Completions whose judging is measured apart."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--completions", type=int, default=2000, help="of a run; a multiple of 100")
    parser.add_argument("--kinds", default=",".join(REWARDS))
    parser.add_argument("--piece", type=int, default=4000, help="characters of a piece")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    runs = {kind: _run(kind, arguments.completions, arguments.piece) for kind in arguments.kinds.split(",")}
    costs = {name: _costs(judge, arguments.piece) for name, judge in JUDGES.items()}
    report(
        "hostile-policy",
        settings={"completions": arguments.completions, "piece": arguments.piece, "tokens": NUM_TOKENS},
        samples_s={f"run, {kind}": [run["wall_s"]] for kind, run in runs.items()},
        comparisons=[],
        findings={"runs": runs, "cpu_s_by_characters": costs},
        output=arguments.output,
    )


def _run(kind: str, num_completions: int, piece: int) -> dict[str, Any]:
    """A whole run, which has to end with its last step: shares of the outcomes, and seconds of judging."""
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        _write_model(folder / "model", _programs() if kind == "code" else _pieces(piece))
        _write_judge(folder / "judge")
        answer_format, answer = ROWS.get(kind, ("gsm8k", "#### 4"))
        for name, sign in (("train", "+"), ("test", "=")):
            rows = [{"question": f"{i} {sign} {i}", "answer": answer} for i in range(10)]
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        start = time.monotonic()
        command = [Path(sys.executable).with_name("rlinf"), "train", "gsm8k-grpo", "--model.path", folder / "model"]
        command += [
            "--task.train_files",
            f"[{folder / 'train.jsonl'}]",
            "--task.eval_files",
            f"[{folder / 'test.jsonl'}]",
        ]
        command += [
            "--task.prompt_template",
            "{question}",
            "--task.answer_format",
            answer_format,
            "--reward.kind",
            kind,
        ]
        command += [
            "--rollout.num_prompts",
            num_completions // NUM_STEPS // GROUP_SIZE,
            "--rollout.max_prompt_tokens",
            30,
        ]
        command += [
            "--algorithm.group_size",
            GROUP_SIZE,
            "--rollout.max_new_tokens",
            NUM_TOKENS,
            "--mode",
            "collocated",
        ]
        command += ["--run.num_steps", NUM_STEPS, "--run.evaluate_every", NUM_STEPS, "--actor.num_shards", 1]
        command += ["--algorithm.kl_coef", 0, "--output", folder / "run", *REWARDS[kind]]
        texts = [str(part) for part in command]
        done = subprocess.run(texts, cwd=folder, capture_output=True, text=True, check=False)
        metrics = folder / "run" / "metrics.jsonl"
        steps = [json.loads(line)["metrics"] for line in metrics.read_text().splitlines()] if metrics.exists() else []
        names = sorted({name for step in steps for name in step if name.startswith("reward/")})
        findings = {
            "exit_code": done.returncode,
            "last_words": (done.stdout + done.stderr)[-500:] if done.returncode else "",
            "steps": len(steps),
            "wall_s": time.monotonic() - start,
            "reward_s": sum(step.get("time/reward_s", 0.0) for step in steps),
            "means": {name: sum(step.get(name, 0.0) for step in steps) / len(steps) for name in names},
        }
    print(kind, json.dumps(findings), flush=True)
    return findings


def _costs(judge: Callable[[str], object], piece: int) -> dict[int, float]:
    """CPU seconds of reading texts, by their characters: the same pieces at one, two and four times the length, and
    units repeated up to a million characters. A lone surrogate, which no tokenizer writes, is among them."""
    sets = [_texts(NUM_TEXTS, piece * factor) for factor in (1, 2, 4)]
    sets.append([unit * (1_000_000 // len(unit)) for unit in (*PIECES[::10], "\ud800")])
    costs = {}
    for texts in sets:
        before = time.process_time()
        for text in texts:
            judge(text)
        costs[sum(map(len, texts))] = time.process_time() - before
    return costs


def _texts(number: int, piece: int) -> list[str]:
    draw = random.Random(0)
    pieces = _pieces(piece)
    return ["".join(draw.choices(pieces, k=NUM_TOKENS)) for _ in range(number)]


def _pieces(size: int) -> list[str]:
    return [unit * (size // len(unit)) for unit in PIECES] + list(SHORT)


def _programs() -> list[str]:
    return [f"```python\n{program}\n```\n" for program in PROGRAMS] + ["```\n" * 1000, "```python\n", " " * 4000]


def _write_model(folder: Path, pieces: Sequence[str]) -> None:
    """A Qwen2 of random weights whose tokens are the pieces, beside the characters of the prompts."""
    tokenizer = character_tokenizer("0123456789+= ")
    tokenizer.add_tokens(list(pieces))
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _write_judge(folder: Path) -> None:
    """A reward model of random weights that reads bytes."""
    alphabet = sorted(ByteLevel.alphabet())
    core = Tokenizer(BPE({byte: i for i, byte in enumerate(alphabet)}, []))
    core.pre_tokenizer = ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(folder)
    config = Qwen2Config(
        vocab_size=len(alphabet), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, pad_token_id=0,
    )  # fmt: skip
    config.num_labels = 1
    AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).save_pretrained(folder)


if __name__ == "__main__":
    main()
