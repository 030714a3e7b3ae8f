"""Peak bytes of one rank beside what `rlinf_sched.derive.memory` counts: benchmarks/results/rank-memory.json.

    python benchmarks/sched/rank_memory.py [PATTERN]

Real backends and engines with real transformers models, at the longest sequences of a recipe, each in processes of its
own. Two measures of a rank, both above what the process took before it made its model:

    exact   the largest sum of heap blocks in use (live_bytes.c), which is what a GPU's allocator would be asked for
    rss     the largest resident memory (VmHWM), in which blocks are that malloc keeps after they were freed

PATTERN chooses cases by a part of their name; the others keep what was measured before.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlinf_sched.derive import Lengths, ModelShape
from rlinf_sched.derive.memory import (
    JobShape,
    RankMemory,
    forward_memory,
    generator_memory,
    trainer_memory,
)
from rlinf_workers.launcher.local import LocalLauncher
from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.models.sequences import SequenceBatch
from rlinf_workers.models.trainable import TokenModel
from rlinf_workers.testing.launchers import launched, start
from rlinf_workers.training.base import BackendSettings, Evaluation, OptimizerSettings
from rlinf_workers.worker import Worker

RESULT = Path(__file__).parents[1] / "results" / "rank-memory.json"
TIMEOUT_S = 900.0
DTYPES = {"float32": 4, "bfloat16": 2}

MODELS: dict[str, dict[str, Any]] = {
    "dense-31M": {
        "model_type": "qwen2",
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "vocab_size": 8000,
        "tie_word_embeddings": False,
    },
    "dense-67M": {
        "model_type": "qwen2",
        "hidden_size": 768,
        "intermediate_size": 2304,
        "num_hidden_layers": 8,
        "num_attention_heads": 12,
        "num_key_value_heads": 4,
        "vocab_size": 16000,
        "tie_word_embeddings": True,
    },
    "moe-30M": {
        "model_type": "qwen3_moe",
        "hidden_size": 384,
        "intermediate_size": 1024,
        "moe_intermediate_size": 384,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "vocab_size": 8000,
        "tie_word_embeddings": False,
    },
}
SIZES = {"short": (2, 4, 32, 32), "long": (2, 4, 128, 192)}
"""Groups of a micro-batch, completions of each, tokens of a prompt, tokens of a completion."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A role on ranks of its own."""

    model: str
    size: str
    role: str = "actor"
    dtype: str = "float32"
    backend: str = "replicated"
    options: dict[str, Any] = field(default_factory=dict)
    num_ranks: int = 1
    num_shards: int = 2

    @property
    def name(self) -> str:
        """`dense-31M short actor fsdp2 x2 bfloat16`"""
        options = [f"{key}={value}" for key, value in self.options.items()]
        return " ".join([self.model, self.size, self.role, self.backend, f"x{self.num_ranks}", self.dtype, *options])


def cases() -> list[Case]:
    """Three models, both backends, both sizes; what else changes the count, on one model; and the other roles."""
    made = []
    for model in MODELS:
        for size in SIZES:
            made += [
                Case(model=model, size=size),
                Case(model=model, size=size, backend="fsdp2", num_ranks=2, num_shards=4),
            ]
        for role in ("rollout", "reference"):
            made.append(Case(model=model, size="long", role=role))
    made += [
        Case(model="dense-31M", size="long", dtype="bfloat16"),
        Case(model="dense-31M", size="long", num_shards=1),
        Case(model="dense-67M", size="short", backend="fsdp2", num_ranks=4, num_shards=8),
    ]
    for options in ({"compute_dtype": "bfloat16"}, {"recompute": True}):
        made.append(Case(model="dense-31M", size="long", backend="fsdp2", num_ranks=2, num_shards=4, options=options))
    return made


def make_folder(model: str, folder: str) -> None:
    """A folder with a config and no weights."""
    values = dict(MODELS[model])
    config = AutoConfig.for_model(values.pop("model_type"), **values, max_position_embeddings=1024)
    config.save_pretrained(folder)


class Measured(Worker):
    """A rank that does the work of a case and says what it took."""

    def measure(self, described: dict[str, Any], folder: str) -> dict[str, int]:
        """Bytes at the peak by either measure, and in use afterwards."""
        case = Case(**described)
        work = {"actor": self._train, "reference": self._read, "rollout": self._generate}[case.role]
        _warm_up(case)
        _ = self.ranks
        gc.collect()
        heap = ctypes.CDLL(None)
        for name in ("rlinf_live_bytes", "rlinf_largest_bytes"):
            getattr(heap, name).restype = ctypes.c_long
        heap.rlinf_forget_largest()
        live, resident = heap.rlinf_live_bytes(), _resident_bytes()
        kept = work(case, ModelSettings(folder=folder, has_weights=False, dtype=case.dtype))
        gc.collect()
        found = {
            "exact": heap.rlinf_largest_bytes() - live,
            "after": heap.rlinf_live_bytes() - live,
            "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - resident,
        }
        del kept
        return found

    def _train(self, case: Case, model: ModelSettings) -> object:
        """Two updates: in the second one the moments are there."""
        batch = _batch(case)
        settings = BackendSettings(name=case.backend, options=case.options, num_shards=case.num_shards)
        backend = settings.make(TokenModel(model, 1.0), self, OptimizerSettings(learning_rate=1e-4))
        for _ in range(2):
            backend.begin(1)
            for shard in backend.shards:
                backend.backward(shard, batch, _loss)
            backend.reduce()
            backend.step(8.0)
        return backend

    def _read(self, case: Case, model: ModelSettings) -> object:
        backend = BackendSettings(name=case.backend, options=case.options).make(TokenModel(model, 1.0), self)
        batch = _batch(case, num_groups=1)
        for _ in range(2):
            backend.forward(batch)
        return backend

    def _generate(self, case: Case, model: ModelSettings) -> object:
        from rlinf_workers.generation.huggingface import HuggingFaceEngine
        from rlinf_workers.generation.sampling import SamplingSettings
        from rlinf_workers.records.language import Prompt

        _, size, prompt_tokens, limit = SIZES[case.size]
        engine = _EngineWithoutTokenizer(model, self.device, max_prompt_tokens=prompt_tokens)
        assert isinstance(engine, HuggingFaceEngine)
        sampling = SamplingSettings(group_size=size, max_new_tokens=limit, temperature=1.0, top_p=1.0)
        ids = _batch(case).prompt_ids
        engine.submit(
            [Prompt(index=i, token_ids=row, reference_answer="") for i, row in enumerate(ids)], sampling, seed=0, step=0
        )
        engine.finished()
        return engine


def _EngineWithoutTokenizer(model: ModelSettings, device: torch.device, *, max_prompt_tokens: int) -> Any:  # noqa: N802
    """An engine whose completions never end."""
    from rlinf_workers.generation import huggingface

    class NoTokenizer:
        eos_token_id = pad_token_id = -1

    huggingface.load_tokenizer = lambda folder: NoTokenizer()
    huggingface.stop_token_ids = lambda model, tokenizer: (-1,)
    huggingface.pad_token_id = lambda model, tokenizer: 0
    return huggingface.HuggingFaceEngine(model, device, max_prompt_tokens=max_prompt_tokens)


def _warm_up(case: Case) -> None:
    """Imports, and what the first products allocate for good."""
    few = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    values = {**MODELS[case.model], **few, "intermediate_size": 32, "moe_intermediate_size": 32, "head_dim": 16}
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    for dtype in (torch.float32, torch.bfloat16):
        model = AutoModelForCausalLM.from_config(config, dtype=dtype)
        model(input_ids=torch.ones(2, 4, dtype=torch.int64)).logits.sum().backward()
        torch.optim.AdamW(model.parameters()).step()


def _loss(answers: Evaluation) -> tuple[torch.Tensor, list[float]]:
    return -answers.logprobs.mean(-1).sum(), [1.0]


def _batch(case: Case, num_groups: int | None = None) -> SequenceBatch:
    """The longest micro-batch; one prompt is shorter, so there is a mask."""
    groups, size, prompt_tokens, limit = SIZES[case.size]
    groups, words = num_groups or groups, MODELS[case.model]["vocab_size"]
    generator = torch.Generator().manual_seed(0)
    mask = torch.ones(groups, prompt_tokens, dtype=torch.int64)
    mask[0, :2] = 0
    return SequenceBatch(
        prompt_ids=torch.randint(0, words, (groups, prompt_tokens), generator=generator),
        prompt_mask=mask,
        completion_ids=torch.randint(0, words, (groups * size, limit), generator=generator),
        loss_mask=torch.ones(groups * size, limit),
    )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def count(case: Case, folder: str) -> RankMemory:
    """What a rank of the case is said to hold."""
    groups, size, prompt_tokens, limit = SIZES[case.size]
    shape = ModelShape.from_folder(folder)
    job = JobShape(
        lengths=Lengths(mean_tokens=limit, limit_tokens=limit, prompt_tokens=prompt_tokens, group_size=size),
        num_groups=groups * case.num_shards,
        dtype_bytes=DTYPES[case.dtype],
        num_shards=case.num_shards,
        backend=case.backend,
        backend_options=case.options,
        micro_batch_groups=groups,
        on_gpu=False,
    )
    if case.role == "actor":
        return trainer_memory(shape, job, case.num_ranks)
    return forward_memory(shape, job) if case.role == "reference" else generator_memory(shape, job)


def run(case: Case) -> dict[str, Any]:
    """One case, counted and measured."""
    with tempfile.TemporaryDirectory() as scratch, launched(LocalLauncher) as launcher:
        make_folder(case.model, f"{scratch}/model")
        counted = count(case, f"{scratch}/model")
        ranks = start(launcher, Path(scratch), Measured, num_ranks=case.num_ranks)
        answers = ranks.call("measure", asdict(case), f"{scratch}/model", timeout_s=TIMEOUT_S)
    found = {key: max(answer[key] for answer in answers) for key in answers[0]}
    num_items = SIZES[case.size][0] if case.role == "rollout" else 1
    peak = counted.peak(num_items)
    return {
        "case": asdict(case),
        "counted_bytes": peak,
        "of_it": counted.parts(num_items),
        "exact_bytes": found["exact"],
        "state_bytes": {"counted": counted.state, "exact": found["after"]},
        "rss_bytes": found["rss"],
        "counted_over_exact": round(peak / found["exact"], 3),
        "rss_over_exact": round(found["rss"] / found["exact"], 3),
    }


def main() -> None:
    """Measures what the command line names, or all."""
    pattern = sys.argv[1] if len(sys.argv) > 1 else ""
    before = json.loads(RESULT.read_text())["cases"] if RESULT.exists() else {}
    rows = {case.name: before[case.name] for case in cases() if case.name in before}
    for case in (case for case in cases() if pattern in case.name):
        row = rows[case.name] = run(case)
        print(
            f"{case.name:60} counted {row['counted_bytes'] / 2**20:7.1f} MiB, exact {row['exact_bytes'] / 2**20:7.1f}, "
            f"ratio {row['counted_over_exact']:.3f}, rss {row['rss_over_exact']:.2f} of exact; state "
            f"{row['state_bytes']['counted'] / 2**20:.1f} / {row['state_bytes']['exact'] / 2**20:.1f}",
            flush=True,
        )
        RESULT.write_text(json.dumps({"torch": torch.__version__, "cases": rows}, indent=1) + "\n")


def _begin() -> None:
    """Makes every process that comes after count its heap, and find this module."""
    source = Path(__file__).with_name("live_bytes.c")
    library = Path(tempfile.mkdtemp(), "live_bytes.so")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    os.environ |= {"LD_PRELOAD": str(library), "PYTHONPATH": str(source.parent)}
    subprocess.run([sys.executable, "-c", "import rank_memory; rank_memory.main()", *sys.argv[1:]], check=True)


if __name__ == "__main__":
    _begin()
