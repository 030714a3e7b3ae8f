"""TRL's GRPOTrainer, unmodified, doing one step whenever a line comes on stdin. Started by trl_comparison.py.

    stdin:  one line a step
    stdout: {"ready": ...} once, then {"step_s": seconds, "completion_tokens": mean, ...} a step, one JSON a line

A step is what TRL calls one: generation, rewards, forward, backward, optimizer. Writing its own log comes after the
clock has stopped.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
import warnings
from typing import Any

from benchmarks.throughput import trl_task

if __name__ == "__main__":
    lines = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever TRL prints goes to stderr
    warnings.filterwarnings("ignore")

    import torch
    import transformers
    import trl  # type: ignore[import-not-found] - only in the interpreter that runs this file
    from datasets import Dataset  # type: ignore[import-not-found]

    model_folder, num_steps, micro_batch = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dtype, on_gpu = getattr(torch, sys.argv[4]), trl_task.TASK.device == "cuda"
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

    class OnDemand(transformers.TrainerCallback):
        """Waits before each step and tells how long it took."""

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if not sys.stdin.readline():
                os._exit(0)
            self._start_s = time.perf_counter()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self._step_s = time.perf_counter() - self._start_s

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if logs and "completions/mean_length" in logs:
                row = {"step_s": self._step_s, "completion_tokens": float(logs["completions/mean_length"])}
                lines.write(json.dumps(row | {"reward": float(logs["reward"])}) + "\n")

    def reward(completions: list[Any], **_: Any) -> list[float]:
        texts = [one if isinstance(one, str) else one[0]["content"] for one in completions]
        return [trl_task.reward(text if isinstance(text, str) else text[0]["text"]) for text in texts]

    def rows(step: int) -> list[dict[str, Any]]:
        if not trl_task.TASK.picture_size:
            return [{"prompt": text} for text in trl_task.prompts(step)]
        pairs = zip(trl_task.prompts(step), trl_task.pictures(step), strict=True)
        return [{"prompt": [{"role": "user", "content": text}], "image": picture} for text, picture in pairs]

    tokenizer: Any = transformers.PreTrainedTokenizerFast.from_pretrained(model_folder)
    auto_class: Any = transformers.AutoModelForCausalLM
    if trl_task.TASK.picture_size:
        auto_class = transformers.AutoModelForImageTextToText
        tokenizer = trl_task.picture_processor(model_folder, tokenizer)
    num_completions = trl_task.NUM_PROMPTS * trl_task.GROUP_SIZE
    trainer = trl.GRPOTrainer(
        model=auto_class.from_pretrained(model_folder, dtype=dtype, trust_remote_code=False),
        processing_class=tokenizer,
        reward_funcs=reward,
        train_dataset=Dataset.from_list([row for step in range(num_steps) for row in rows(step)]),
        callbacks=[OnDemand()],
        args=trl.GRPOConfig(
            output_dir=tempfile.mkdtemp(),
            use_cpu=not on_gpu,
            bf16=on_gpu,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=num_completions // micro_batch,
            beta=0.0,
            shuffle_dataset=False,
            max_steps=num_steps,
            **trl_task.TRL_SETTINGS,
        ),
    )
    versions = {"trl": trl.__version__, "torch": torch.__version__, "transformers": transformers.__version__}
    lines.write(json.dumps({"ready": versions}) + "\n")
    trainer.train()
