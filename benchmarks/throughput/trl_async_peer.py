"""TRL's AsyncGRPOTrainer, unmodified, doing one step whenever a line comes on stdin. Started by trl_async.py.

    stdin:  one line a step
    stdout: {"ready": ...} once, then {"step_s": seconds, "completion_tokens": mean, ...} a step, one JSON a line

TRL generates with a vLLM server on a GPU. Here, on a CPU, its two interfaces for other engines (rollout worker, weight
transfer) are taken by a process that generates with transformers, as TRL's GRPOTrainer does, a step's prompts at a time
and `max_staleness` 1 ahead of training. Weights pass through shared memory.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import sys
import tempfile
import time
import warnings
from typing import Any

from benchmarks.throughput import trl_task

NUM_COMPLETIONS = trl_task.NUM_PROMPTS * trl_task.GROUP_SIZE
MAX_STALENESS = 1


class Engine:
    """A process that generates step after step, each as soon as the weights of `MAX_STALENESS` steps before are there.

    It is TRL's rollout worker and its weight transfer in one.
    """

    def __init__(self, folder: str, weights: dict[str, Any]) -> None:
        context = multiprocessing.get_context("spawn")
        self.rollout_buffer: Any = context.Queue()
        self.metrics_queue: queue.Queue[dict[str, float]] = queue.Queue()
        self._weights, self._lock = weights, context.Lock()
        self._version = context.Value("i", 0)
        arguments = (folder, weights, self._lock, self._version, self.rollout_buffer)
        self._process = context.Process(target=generate_steps, args=arguments, daemon=True)

    def start(self) -> None:
        self._process.start()

    def stop(self) -> None:
        self._process.kill()

    def update_model_version(self, model_version: int) -> None:
        self._version.value = model_version

    def check_health(self, stale_after_s: float) -> None:
        if not self._process.is_alive():
            raise RuntimeError("the process that generates has ended")

    def init_weight_transfer(self) -> None: ...

    def pause(self) -> None:
        self._lock.acquire()

    def send_weights(self, iterator: Any) -> None:
        for name, tensor in iterator:
            self._weights[name].copy_(tensor)

    def resume(self) -> None:
        self._lock.release()

    def destroy(self) -> None: ...


def generate_steps(folder: str, weights: dict[str, Any], lock: Any, version: Any, samples: Any) -> None:
    """The process that generates. Weights are copied between steps; version 1 is the one before training."""
    import torch
    import transformers

    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    step = 0
    while True:
        while version.value < step + 1 - MAX_STALENESS:
            time.sleep(0.0005)
        with lock:
            taken = version.value
            model.load_state_dict(weights, strict=False)
        for sample in generate(model, tokenizer, step, taken):
            samples.put(sample)
        step += 1


def generate(model: Any, tokenizer: Any, step: int, version: int) -> list[Any]:
    """The samples of a step, with advantages within each group."""
    import torch
    from trl.experimental.async_grpo.async_rollout_worker import RolloutSample  # type: ignore[import-not-found]

    texts = [text for text in trl_task.prompts(step) for _ in range(trl_task.GROUP_SIZE)]
    prompts = torch.tensor(tokenizer(texts)["input_ids"])
    with torch.inference_mode():
        output = model.generate(
            prompts,
            attention_mask=torch.ones_like(prompts),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            max_new_tokens=trl_task.MAX_NEW_TOKENS,
            output_logits=True,
            return_dict_in_generate=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
        )
        tokens = output.sequences[:, prompts.shape[1] :]
        log_probs = torch.stack(
            [logits.log_softmax(-1).gather(1, tokens[:, i : i + 1])[:, 0] for i, logits in enumerate(output.logits)],
            dim=1,
        )
    ended = (tokens == tokenizer.eos_token_id).cumsum(1)
    lengths = ((ended == 0).sum(1) + 1).clamp(max=tokens.shape[1]).tolist()
    completions = [row[:length].tolist() for row, length in zip(tokens, lengths, strict=True)]
    rewards = torch.tensor([trl_task.reward(text) for text in tokenizer.batch_decode(completions)])
    groups = rewards.view(-1, trl_task.GROUP_SIZE)
    advantages = ((groups - groups.mean(1, keepdim=True)) / (groups.std(1, keepdim=True) + 1e-4)).flatten().tolist()
    width = prompts.shape[1]
    return [
        RolloutSample(
            prompt=[],
            completion=[],
            input_ids=prompts[i].tolist() + completions[i],
            completion_mask=[0] * width + [1] * lengths[i],
            old_log_probs=[0.0] * width + log_probs[i, : lengths[i]].tolist(),
            advantage=advantages[i],
            model_version=version,
            metrics={"reward": float(rewards[i]), "staleness": float(step + 1 - version)},
        )
        for i in range(len(texts))
    ]


def main() -> None:
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever TRL prints goes to stderr
    warnings.filterwarnings("ignore")

    import torch
    import transformers
    import trl  # type: ignore[import-not-found] - only in the interpreter that runs this file
    from datasets import Dataset  # type: ignore[import-not-found]
    from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer  # type: ignore[import-not-found]

    model_folder, num_steps = sys.argv[1], int(sys.argv[2])
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

    class OnDemand(transformers.TrainerCallback):
        """Waits after each step for the next line, and tells how long it is since the last one came."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._wait()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "completions/mean_length" in logs:
                row = {"step_s": time.perf_counter() - self._start_s, "staleness": logs["staleness"]}
                row |= {"completion_tokens": logs["completions/mean_length"], "reward": logs["reward"]}
                lines.write(json.dumps(row) + "\n")
                self._wait()

        def _wait(self) -> None:
            if not sys.stdin.readline():
                os.killpg(0, 9)
            self._start_s = time.perf_counter()

    first: Any = transformers.AutoModelForCausalLM.from_pretrained(model_folder)
    engine = Engine(model_folder, {name: p.detach().clone().share_memory_() for name, p in first.named_parameters()})
    trainer = AsyncGRPOTrainer(
        model=model_folder,
        processing_class=transformers.PreTrainedTokenizerFast.from_pretrained(model_folder),
        reward_funcs=[],
        train_dataset=Dataset.from_list([{"prompt": "0"}]),
        callbacks=[OnDemand()],
        rollout_worker=engine,
        args=AsyncGRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=True,
            bf16=False,
            per_device_train_batch_size=NUM_COMPLETIONS,
            gradient_accumulation_steps=1,
            max_staleness=MAX_STALENESS,
            weight_sync_steps=1,
            max_steps=num_steps,
            **trl_task.TRL_SETTINGS,
        ),
    )
    trainer.weight_transfer = engine
    versions = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    lines.write(json.dumps({"ready": versions}) + "\n")
    trainer.train()


if __name__ == "__main__":
    main()
