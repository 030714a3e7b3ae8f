"""A GRPO step against TRL's GRPOTrainer: samples a second.

    python -m benchmarks.throughput.trl_comparison --trl-python FOLDER/bin/python

Makes one with TRL (no need to touch the project's environment; take the torch version that the project uses):

    python -m venv FOLDER && FOLDER/bin/pip install "torch==2.13.0" "trl==1.16.0"

Both train the same Qwen2 (float32, same first weights) on the same prompts: 64 prompts x 8 completions, the same reward
of the text, one optimizer step, no KL. Sizes are the sorting job's; with TRL_COMPARISON_TASK=long a model ten
times as large and completions of 32 tokens, with TRL_COMPARISON_TASK=pictures a Qwen2.5-VL that sees one with each
prompt (trl_task.py; TRL's interpreter then needs pillow). Ours is a flow of rollout, reward and actor, collocated
on two CPU slots with one thread in each process; TRL runs with both cores (two threads) and, as another side, with one.
With TRL_COMPARISON_TASK=gpu both train on one GPU: TRL with float32 weights under autocast and with bfloat16 weights,
ours with float32 weights, bfloat16 computation and a rollout in bfloat16. TRL's GRPOTrainer is used as it is, in a
process of its own that does a step when told. Steps are taken in turn.
Target: at least 1.5 times the samples a second.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import compare, interleave, mean_seconds, report
from benchmarks.throughput import trl_task

from rlinf.config.common import ClusterConfig
from rlinf.config.devices import make_cluster
from rlinf.machine import this_machine
from rlinf.processes.env_vars import worker_env_vars
from rlinf.tasks.language import character_tokenizer
from rlinf_algos import preset
from rlinf_algos.rewards import RewardResult
from rlinf_sched import Cluster, plan_for_mode
from rlinf_workers import Executor, Flow, Span, StepContext
from rlinf_workers.engines import SamplingSettings
from rlinf_workers.models import ModelSettings, PictureProcessor, load_tokenizer
from rlinf_workers.roles import Actor, ActorSettings, Prompt, Reward, RewardSettings, Rollout, RolloutSettings
from rlinf_workers.trainers import BackendSettings, OptimizerSettings

REPOSITORY = Path(__file__).parents[2]
NUM_SAMPLES = trl_task.NUM_PROMPTS * trl_task.GROUP_SIZE
TARGET = 1.5
ON_GPU = trl_task.TASK.device == "cuda"


def task_reward(completion: str, reference: str, /) -> RewardResult:
    """The task's reward as a rule for the reward worker."""
    return RewardResult(value=trl_task.reward(completion), outcome="right")


def write_model(folder: Path) -> int:
    """A Hugging Face folder with weights from a seed; returns the number of parameters."""
    from transformers import AutoModelForCausalLM, Qwen2Config

    if trl_task.TASK.picture_size:
        return _write_seeing_model(folder)
    tokenizer = character_tokenizer(trl_task.ALPHABET)
    config = Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=trl_task.TASK.hidden_size,
        intermediate_size=trl_task.TASK.intermediate_size,
        num_hidden_layers=trl_task.TASK.num_layers,
        num_attention_heads=trl_task.TASK.num_heads,
        num_key_value_heads=trl_task.TASK.num_kv_heads,
        max_position_embeddings=512,
        tie_word_embeddings=trl_task.TASK.tied,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    torch.manual_seed(0)
    with torch.device(trl_task.TASK.device):
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def _write_seeing_model(folder: Path) -> int:
    from transformers import Qwen2_5_VLConfig, Qwen2_5_VLForConditionalGeneration

    task, tokenizer = trl_task.TASK, character_tokenizer(trl_task.ALPHABET)
    tokenizer.add_special_tokens({"additional_special_tokens": list(trl_task.PICTURE_TOKENS)})
    start, image, end, video = tokenizer.convert_tokens_to_ids(list(trl_task.PICTURE_TOKENS))
    config = Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": task.hidden_size,
            "intermediate_size": task.intermediate_size,
            "num_hidden_layers": task.num_layers,
            "num_attention_heads": task.num_heads,
            "num_key_value_heads": task.num_kv_heads,
            "max_position_embeddings": 512,
            "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]},
            "bos_token_id": None,
            "eos_token_id": tokenizer.eos_token_id,
            "pad_token_id": tokenizer.pad_token_id,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 128,
            "intermediate_size": 256,
            "num_heads": 4,
            "patch_size": 8,
            "out_hidden_size": task.hidden_size,
            "window_size": 56,
            "fullatt_block_indexes": [1],
        },
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = Qwen2_5_VLForConditionalGeneration(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 8, "merge_size": 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor | {"min_pixels": 64, "max_pixels": 1 << 20}))
    return sum(parameter.numel() for parameter in model.parameters())


def make_flow(
    folder: Path, micro_batch_groups: int, max_tokens: int | None, num_shards: int, *, max_staleness: int = 0
) -> Flow:
    """rollout -> reward -> actor -> weights -> rollout"""
    model = ModelSettings(folder=str(folder), has_weights=True)
    sampling = SamplingSettings(group_size=trl_task.GROUP_SIZE, max_new_tokens=trl_task.MAX_NEW_TOKENS)
    rollout = RolloutSettings(
        model=replace(model, dtype="bfloat16") if ON_GPU else model,
        train=sampling,
        evaluate=sampling,
        max_prompt_tokens=None,
    )
    actor = ActorSettings(
        model=model,
        optimizer=OptimizerSettings(learning_rate=trl_task.LEARNING_RATE, betas=(0.9, 0.999)),
        algorithm=preset("grpo", group_size=trl_task.GROUP_SIZE, max_staleness=max_staleness),
        backend=BackendSettings(name="fsdp2", options={"compute_dtype": "bfloat16"}, num_shards=num_shards)
        if ON_GPU
        else BackendSettings(num_shards=num_shards),
        micro_batch_groups=micro_batch_groups,
        max_tokens_per_micro_batch=max_tokens,
        num_prompts=trl_task.NUM_PROMPTS,
        max_completion_tokens=trl_task.MAX_NEW_TOKENS,
        temperature=1.0,
    )
    rule = "benchmarks.throughput.trl_comparison:task_reward"
    flow = Flow("grpo", max_staleness=max_staleness)
    flow.worker("rollout", Rollout, rollout)
    flow.worker("reward", Reward, RewardSettings(rule=rule, tokenizer_folder=str(folder)))
    flow.worker("actor", Actor, actor)
    flow.stage("rollout", Rollout.generate, reads="prompts", writes="samples")
    flow.stage("reward", Reward.score, reads="samples", writes="scored", needs_device=False)
    flow.stage("actor", Actor.train, reads="scored", dispatch="key", ordered=True, trains=True)
    return flow.weights("actor", to="rollout")


@dataclass(frozen=True)
class InMemory:
    """A picture of a prompt."""

    picture: Any
    digest: str

    def decode(self) -> Any:
        return self.picture


def make_prompts(tokenizer: Any, step: int, processor: PictureProcessor | None = None) -> list[Prompt]:
    """The items of a step."""
    if processor is not None:
        prompts = []
        for i, (text, picture) in enumerate(zip(trl_task.prompts(step), trl_task.pictures(step), strict=True)):
            whole = f"<|vision_start|><|image_pad|><|vision_end|>{text}"
            token_ids, pictures = processor.encode(whole, [InMemory(picture, f"{step} {i}")])
            prompts.append(Prompt(index=i, token_ids=torch.tensor(token_ids), reference_answer="", pictures=pictures))
        return prompts
    return [
        Prompt(index=i, token_ids=torch.tensor(tokenizer(text)["input_ids"]), reference_answer="")
        for i, text in enumerate(trl_task.prompts(step))
    ]


@dataclass
class FlowSide:
    """Our step. The clock covers tokenizing the prompts too, as TRL's does."""

    executor: Executor
    flow: Flow
    num_warmup: int
    tokenizer: Any = field(default_factory=lambda: character_tokenizer(trl_task.ALPHABET))
    processor: PictureProcessor | None = None
    spans: list[Span] = field(default_factory=list)
    metrics: list[dict[str, float]] = field(default_factory=list)

    def step(self, index: int) -> float:
        start_s = time.perf_counter()
        items = make_prompts(self.tokenizer, index, self.processor)
        context = StepContext(step=index, phase="train", seed=0, num_items=len(items))
        run = self.executor.run(self.flow, context=context, feeds={"prompts": items})
        spent_s = time.perf_counter() - start_s
        if index >= self.num_warmup:
            self.spans.extend(run.spans)
            self.metrics.append(run.metrics)
        return spent_s

    def mean(self, metric: str) -> float:
        return statistics.mean(metrics[metric] for metrics in self.metrics)


class TrlSide:
    """TRL's step, in its process. Use as a context manager."""

    def __init__(
        self,
        python: str,
        folder: Path,
        *,
        num_steps: int,
        micro_batch: int = NUM_SAMPLES,
        num_threads: int,
        dtype: str = "float32",
        module: str = "trl_peer",
    ) -> None:
        self._log_path = folder.parent / f"{module}-{num_threads}-{dtype}.log"
        self.rows: list[dict[str, float]] = []
        threads = {name: str(num_threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
        with self._log_path.open("w") as log:
            self._process = subprocess.Popen(
                [python, "-m", f"benchmarks.throughput.{module}", str(folder), str(num_steps), str(micro_batch), dtype],
                cwd=REPOSITORY,
                start_new_session=True,
                env=os.environ | threads | {"TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
            )
        self.versions: dict[str, str] = {}

    def wait_until_ready(self) -> None:
        self.versions = self._read()["ready"]

    def __enter__(self) -> TrlSide:
        return self

    def __exit__(self, *_: object) -> None:
        self.signal(signal.SIGKILL)
        self._process.communicate()

    def signal(self, number: int) -> None:
        """Sends a signal to all its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def step(self, index: int) -> float:
        assert self._process.stdin is not None, "it was opened with a pipe"
        self._process.stdin.write("step\n")
        self._process.stdin.flush()
        self.rows.append(self._read())
        return self.rows[-1]["step_s"]

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None, "it was opened with a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"the process with TRL ended; its last words:\n{self._log_path.read_text()[-3000:]}")
        return json.loads(line)


def measure(options: argparse.Namespace) -> None:
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = work / "model"
        num_parameters = write_model(folder)
        num_steps = options.warmup + options.rounds
        make = partial(TrlSide, options.trl_python, folder, num_steps=num_steps, micro_batch=options.trl_micro_batch)
        if ON_GPU:
            contexts = {f"trl, {dtype} weights": make(num_threads=1, dtype=dtype) for dtype in options.trl_dtypes}
        else:
            contexts = {f"trl, {n} thread{'s' * (n > 1)}": make(num_threads=n) for n in options.trl_threads}
        trl_sides = {name: stack.enter_context(side) for name, side in contexts.items()}
        ours = _start_flow(stack, folder, options)  # while TRL starts
        for side in trl_sides.values():
            side.wait_until_ready()
        sides = {"rlinf": ours.step} | {name: side.step for name, side in trl_sides.items()}
        samples_s = interleave(sides, num_warmup=options.warmup, num_rounds=options.rounds)
        comparisons = [compare(samples_s, name, "rlinf") for name in trl_sides]
        _report(options, num_parameters, samples_s, comparisons, ours, trl_sides)


def _start_flow(stack: ExitStack, folder: Path, options: argparse.Namespace) -> FlowSide:
    num_shards = 1 if ON_GPU else options.slots
    flow = make_flow(folder, options.micro_batch_groups, options.max_tokens, num_shards)
    cluster = make_cluster(ClusterConfig(num_devices=1), this_machine()) if ON_GPU else Cluster.cpu_slots(options.slots)
    plan = plan_for_mode(flow.graph(), cluster, "collocated")
    if ON_GPU:  # all of it has room there at once, which is when `rlinf train` plans so
        plan = replace(plan, stages=tuple(replace(stage, offload=False) for stage in plan.stages))
    environment = worker_env_vars(ClusterConfig(threads_per_device=1))
    executor = stack.enter_context(Executor(cluster=cluster, env_vars=environment))
    executor.start(flow, plan)
    executor.sync_weights()
    processor = None
    if trl_task.TASK.picture_size:
        processor = PictureProcessor(str(folder), load_tokenizer(str(folder)))
    return FlowSide(executor, flow, options.warmup, processor=processor)


def _report(
    options: argparse.Namespace,
    num_parameters: int,
    samples_s: dict[str, list[float]],
    comparisons: list[Any],
    ours: FlowSide,
    trl_sides: dict[str, TrlSide],
) -> None:
    rates = {side: NUM_SAMPLES / statistics.median(samples) for side, samples in samples_s.items()}
    tokens = {"rlinf": ours.mean("rollout/completion_tokens")} | {
        name: _mean(side.rows[options.warmup :], "completion_tokens") for name, side in trl_sides.items()
    }
    rewards = {"rlinf": ours.mean("reward/mean")} | {
        name: _mean(side.rows[options.warmup :], "reward") for name, side in trl_sides.items()
    }
    seconds = mean_seconds(ours.spans, options.rounds)
    for side, rate in rates.items():
        print(f"{side:<28} {rate:8.1f} samples/s, {tokens[side]:.1f} tokens, reward {rewards[side]:.3f}")
    for label, value in seconds.items():
        print(f"  {value * 1e3:9.1f} ms  {label}")
    device = {"device": torch.cuda.get_device_name()} if ON_GPU else {}
    report(
        f"trl-comparison-{trl_task.NAME}",
        settings=device
        | {
            "num_parameters": num_parameters,
            "num_prompts": trl_task.NUM_PROMPTS,
            "group_size": trl_task.GROUP_SIZE,
            "max_new_tokens": trl_task.MAX_NEW_TOKENS,
            "slots": options.slots,
            "micro_batch_groups": options.micro_batch_groups,
            "max_tokens_per_micro_batch": options.max_tokens,
            "trl_micro_batch_completions": options.trl_micro_batch,
            "warmup": options.warmup,
            "target_ratio": TARGET,
            "trl_versions": next(iter(trl_sides.values())).versions,
        },
        samples_s=samples_s,
        comparisons=comparisons,
        findings={
            "meets_target": min(comparison.ratio_of_medians for comparison in comparisons) >= TARGET,
            "samples_per_s": rates,
            "mean_completion_tokens": tokens,
            "mean_reward": rewards,
            "flow_seconds_by_span": seconds,
        },
        output=options.output,
    )


def _mean(rows: Sequence[dict[str, float]], key: str) -> float:
    return statistics.mean(row[key] for row in rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", required=True, help="interpreter that can import trl")
    parser.add_argument("--trl-threads", type=int, nargs="+", default=[2, 1], help="a side of TRL for each number")
    parser.add_argument(
        "--trl-dtypes", nargs="+", default=["float32", "bfloat16"], help="of TRL's weights on a GPU, a side for each"
    )
    parser.add_argument(
        "--trl-micro-batch", type=int, default=NUM_SAMPLES, help="completions in one forward and backward of TRL"
    )
    parser.add_argument("--slots", type=int, default=2, help="CPU slots of the flow, one thread each")
    parser.add_argument(
        "--micro-batch-groups", type=int, default=32, help="groups in one of our forwards; a rank has 32"
    )
    parser.add_argument(
        "--max-tokens", type=int, default=None, help="tokens in one of our forwards, packed; instead of groups"
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2, help="rounds that do not count")
    parser.add_argument("--output", type=Path, default=None)
    torch.set_num_threads(1)
    measure(parser.parse_args())


if __name__ == "__main__":
    main()
