"""The recipe for real checkpoints: a small model of the Qwen2 architecture, on rows of GSM8K's form, made and real."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from command_line import END_TIMEOUT_S, RLINF, environment, last_checkpoint, rows, train, train_here
from hub_server import hub_server

DATA = Path(os.environ.get("RLINF_TEST_DATA", Path(__file__).parents[2] / "shared" / "data"))
"""A folder with the public benchmark files; tests on real rows are skipped where it is absent."""

SHORT = {
    "run.num_steps": 2,
    "run.evaluate_every": 2,
    "task.num_held_out": 4,
    "rollout.num_prompts": 4,
    "rollout.max_new_tokens": 6,
    "rollout.max_prompt_tokens": 128,
    "algorithm.group_size": 4,
    "model.dtype": "float32",
    "actor.learning_rate": 1e-3,
    "algorithm.kl_coef": 0.1,
    "evaluation.num_samples": 2,
    "evaluation.temperature": 0.6,
}


CAN_MOUNT = (
    shutil.which("unshare") is not None
    and subprocess.run(["unshare", "-m", "true"], stderr=subprocess.DEVNULL).returncode == 0
)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A checkpoint as a hub has it: config, safetensors, a byte-level BPE tokenizer with a chat's special tokens."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, Qwen2Config

    folder = tmp_path_factory.mktemp("qwen2")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train_from_iterator([row["question"] for row in own_rows(40)], trainer)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|endoftext|>", eos_token="<|im_end|>", padding_side="left"
    ).save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer.get_vocab()),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=2,
        pad_token_id=0,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return folder


def own_rows(count, start=0):
    """Problems in GSM8K's form, made here."""
    for i in range(start, start + count):
        a, b = 3 + i % 17, 2 + i % 11
        question = f"Nora picks {a} apples in the morning and {b} in the afternoon. How many apples has she got?"
        yield {"question": question + f" (basket {i})", "answer": f"She has {a} + {b} = {a + b}.\n#### {a + b}"}


def write_rows(path, some_rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in some_rows))
    return path


def run(tmp_path, model_folder, train_file, eval_file, further, recipe="gsm8k-grpo"):
    settings = SHORT | {
        "task.eval_sets": f"{{{further[0]}: {further[1]}}}",
        "model.path": model_folder,
        "task.train_files": f"[{train_file}]",
        "task.eval_files": f"[{eval_file}]",
        "task.long_prompts": "keep_end",
    }
    return train(recipe, tmp_path / "run", settings)


def check(output, further, num_problems):
    metrics = rows(output)
    assert len(metrics) == 2
    assert metrics[0]["actor/ref_kl"] == pytest.approx(0.0, abs=1e-6), "the reference is the policy at the start"
    assert metrics[0]["rollout/logprob_gap_mean"] < 1e-4, "the engine that sampled and the actor agree"
    evaluation = rows(output, "evaluations.jsonl")[-1]
    assert evaluation["num_problems"] == 4
    assert evaluation[f"num_problems/{further}"] == num_problems, "a further set is not limited by num_held_out"
    assert 0 <= evaluation[f"accuracy/{further}"] <= 1


@pytest.mark.slow
def test_names_on_the_hub_and_a_second_start_without_it(tmp_path, model_folder):
    from transformers import AutoModelForCausalLM

    data = tmp_path / "data"
    data.mkdir()
    write_rows(data / "train.jsonl", own_rows(16))
    write_rows(data / "test.jsonl", own_rows(6, start=16))
    home = {"HF_HOME": str(tmp_path / "hf_home")}
    settings = SHORT | {
        "model.path": "org/model",
        "task.train_files": "org/rows[train]",
        "task.eval_files": "org/rows[test]",
        "task.eval_sets": "{gsm8k: 'org/rows[test]'}",
        "task.long_prompts": "keep_end",
        "mode": "collocated",
        "cluster.num_devices": 1,
    }
    output = tmp_path / "run"
    with hub_server() as hub:
        commits = hub.add("org/model", model_folder), hub.add("org/rows", data, "datasets")
        online = home | {"HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        train("gsm8k-grpo", output, settings | {"run.num_steps": 1}, variables=online)
    config = (output / "config.yaml").read_text()
    assert f"path: org/model@{commits[0]}\n" in config and f"- org/rows@{commits[1]}[train]\n" in config
    train(None, output, {"run.num_steps": 2}, variables=home)
    check(output, "gsm8k", 6)
    AutoModelForCausalLM.from_pretrained(last_checkpoint(output) / "model")


@pytest.mark.slow
@pytest.mark.skipif(not CAN_MOUNT, reason="hiding a folder from one node takes a mount namespace (unshare -m)")
def test_a_node_with_a_cache_of_its_own_downloads_a_model_once(tmp_path, model_folder):
    """Whatever the number of its workers. The second node sees an empty cache where the first has the model."""
    pytest.importorskip("ray", reason="pip install 'rlinf[ray]'")
    home = tmp_path / "hf_home"
    home.mkdir()
    settings = SHORT | {
        "model.path": "org/model",
        "task.train_files": f"[{write_rows(tmp_path / 'train.jsonl', own_rows(16))}]",
        "task.eval_files": f"[{write_rows(tmp_path / 'test.jsonl', own_rows(6, start=16))}]",
        "task.eval_sets": "{}",
        "task.long_prompts": "keep_end",
        "mode": "collocated",
        "run.num_steps": 1,
        "cluster.num_devices": 2,
        "cluster.launcher": "ray",
    }
    with hub_server() as hub, two_ray_nodes(hides=home) as address:
        settings["cluster.launcher_options"] = f"{{address: '{address}', num_nodes: 2}}"
        hub.add("org/model", model_folder)
        online = {"HF_HOME": str(home), "HF_ENDPOINT": hub.url, "HF_HUB_OFFLINE": "0"}
        output = train("gsm8k-grpo", tmp_path / "run", settings, variables=online, on_network=True)
    assert {log.stem for log in (output / "logs" / "rollout").glob("*.log")} == {"0", "1"}, "both nodes read the model"
    weights = [request for request in hub.requests if request.startswith("GET") and "safetensors" in request]
    assert len(weights) == 2, "one download a node"


@contextmanager
def two_ray_nodes(*, hides):
    """A Ray cluster of two nodes on this machine, with one CPU each; where the first has the folder `hides`, the second
    one sees an empty one. Yields its address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    address = f"127.0.0.1:{port}"
    start = [str(Path(sys.executable).with_name("ray")), "start", "--num-cpus=1", "--block", "--disable-usage-stats"]
    start += ["--object-store-memory=83886080"]
    in_namespace = ["unshare", "-m", "sh", "-c", f'mount -t tmpfs none "{hides}" && exec "$@"', "sh"]
    with tempfile.TemporaryDirectory(prefix="ray") as folder:  # Ray makes sockets there, whose paths have to be short
        processes = [
            subprocess.Popen([*start, "--head", "--include-dashboard=false", f"--port={port}", f"--temp-dir={folder}"])
        ]
        try:
            while processes[0].poll() is None and not accepts(port):
                time.sleep(0.1)
            processes.append(subprocess.Popen([*in_namespace, *start, f"--address={address}"]))
            yield address
        finally:
            for process in reversed(processes):
                process.terminate()
                process.wait(END_TIMEOUT_S)


def accepts(port):
    with socket.socket() as client:
        return client.connect_ex(("127.0.0.1", port)) == 0


@pytest.mark.slow
def test_an_adapter_learns_from_rows_made_here(tmp_path, model_folder):
    """And peft loads what a checkpoint holds, as `rlinf eval` does."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    train_file = write_rows(tmp_path / "train.jsonl", own_rows(16))
    eval_file = write_rows(tmp_path / "eval.jsonl", own_rows(6, start=16))
    output = run(tmp_path, model_folder, train_file, eval_file, ("gsm8k", eval_file), "gsm8k-grpo-lora")
    check(output, "gsm8k", 6)
    assert not (output / "logs" / "reference").exists()
    base = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    adapted: Any = PeftModel.from_pretrained(base, last_checkpoint(output) / "model")
    assert adapted.peft_config["default"].r == 32
    scores = [
        evaluate(tmp_path / f"eval-{name}", eval_file, model)
        for name, model in (("run", output), ("base", model_folder))
    ]
    assert [row["problem"] for row in scores[0]] == [row["problem"] for row in scores[1]]


def evaluate(output, eval_file, model):
    """The samples of an evaluation."""
    flags = ["--k", "2", "--temperature", "1.0", "--max_new_tokens", "6", "--cluster.num_devices", "1"]
    command = [*RLINF, "eval", f"gsm8k={eval_file}", "--model", str(model), "--output", str(output), *flags]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), timeout=END_TIMEOUT_S)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (output / "samples.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_real_rows(tmp_path, model_folder):
    files = [DATA / f"{name}.jsonl" for name in ("gsm8k_train", "gsm8k_test", "aime24")]
    if not all(file.exists() for file in files):
        pytest.skip(f"no GSM8K files in {DATA}; set RLINF_TEST_DATA")
    train_file, eval_file, aime = files
    check(run(tmp_path, model_folder, train_file, eval_file, ("aime24", aime)), "aime24", 30)


HOSTILE = (
    *("<think>" * 500, "</think><answer>" * 300, "the answer is A " + " " * 50_000, "1,111" * 10_000, "```\n" * 10_000),
    *("\\boxed{9^{9^{9^{9}}}}", "\\boxed{" + "x=(" * 240 + "1" + ")" * 240 + "}", "\\boxed{5" + "!" * 400 + "}"),
    *("\\boxed{0=1=2=3=4=5}", "\x00\u0301\u202e" * 1000),
)
"""Tokens of a policy that wants the judges to fail."""


@pytest.mark.slow
def test_no_text_of_a_policy_ends_a_run(tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, Qwen2Config

    from rlinf.tasks.language import character_tokenizer

    tokenizer = character_tokenizer("0123456789+=")
    tokenizer.add_tokens(list(HOSTILE))
    tokenizer.save_pretrained(tmp_path / "model")
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(tmp_path / "model")
    questions = [{"question": f"{i}+{i}=", "answer": f"#### {2 * i}"} for i in range(1, 9)]
    kinds = ("math", "numeric", "format")
    settings = SHORT | {
        "model.path": tmp_path / "model",
        "task.train_files": f"[{write_rows(tmp_path / 'train.jsonl', questions)}]",
        "task.eval_files": f"[{write_rows(tmp_path / 'eval.jsonl', [{'question': '9+9=', 'answer': '#### 18'}])}]",
        "task.num_held_out": 1,
        "task.prompt_template": "{question}",
        "rollout.max_prompt_tokens": 8,
        "algorithm.kl_coef": 0,
        "actor.num_shards": 1,
        "mode": "collocated",
        "reward.kind": "weighted",
        **{f"reward.terms.{kind}.reward.kind": kind for kind in kinds},
        **{f"reward.terms.{kind}.weight": 1.0 for kind in kinds},
        "run.max_judge_failures": 0.0,
    }
    metrics = rows(train_here("gsm8k-grpo", tmp_path / "run", settings))
    assert [step["reward/judge_failures"] for step in metrics] == [0.0, 0.0]
    causes = {name for step in metrics for name, share in step.items() if share and name.startswith("reward/")}
    assert causes >= {"reward/timeout", "reward/memory", "reward/unparseable"}
