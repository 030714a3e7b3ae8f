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
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rank_cases import SIZES, Case, backend_of, batch, cases, count, make_folder, update, warm_up

from rlinf_workers import Worker
from rlinf_workers.launchers import LocalLauncher
from rlinf_workers.models import ModelSettings
from rlinf_workers.models.sequences import SequenceBatch
from rlinf_workers.testing.launchers import launched, start

RESULT = Path(__file__).parents[1] / "results" / "rank-memory.json"
TIMEOUT_S = 900.0


class Measured(Worker):
    """A rank that does the work of a case and says what it took."""

    def measure(self, described: dict[str, Any], folder: str) -> dict[str, int]:
        """Bytes at the peak of the work by either measure, at that of making the model, and in use afterwards."""
        case = Case(**described)
        do = {"actor": self._train, "reference": self._read, "rollout": self._generate}[case.role]
        warm_up(case, self.device)
        _ = self.ranks
        gc.collect()
        heap = ctypes.CDLL(None)
        for name in ("rlinf_live_bytes", "rlinf_largest_bytes"):
            getattr(heap, name).restype = ctypes.c_long
        heap.rlinf_forget_largest()
        live, resident = heap.rlinf_live_bytes(), _resident_bytes()
        holder, work = do(case, ModelSettings(folder=folder, has_weights=False, dtype=case.dtype))
        gc.collect()
        begin = heap.rlinf_largest_bytes() - live
        heap.rlinf_forget_largest()
        work()
        gc.collect()
        sizes = {
            "exact": heap.rlinf_largest_bytes() - live,
            "begin": begin,
            "after": heap.rlinf_live_bytes() - live,
            "rss": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - resident,
        }
        sizes["saved"] = _saved_bytes(heap, holder) if case.role == "actor" else 0
        del holder
        return sizes

    def _train(self, case: Case, model: ModelSettings) -> tuple[object, Callable[[], None]]:
        """Two updates: in the second one the moments are there."""
        backend = backend_of(case, model, self)

        def work() -> None:
            for _ in range(2):
                update(case, backend, self.device)

        return backend, work

    def _read(self, case: Case, model: ModelSettings) -> tuple[object, Callable[[], None]]:
        backend = backend_of(case, model, self)

        def work() -> None:
            for _ in range(2):
                backend.forward(batch(case, num_groups=1))

        return backend, work

    def _generate(self, case: Case, model: ModelSettings) -> tuple[object, Callable[[], None]]:
        from rlinf_workers.engines import HuggingFaceEngine, SamplingSettings
        from rlinf_workers.roles import Prompt

        _, size, prompt_tokens, limit = SIZES[case.size]
        engine = _EngineWithoutTokenizer(model, self.device, max_prompt_tokens=prompt_tokens)
        assert isinstance(engine, HuggingFaceEngine)
        sampling = SamplingSettings(group_size=size, max_new_tokens=limit, temperature=1.0, top_p=1.0)
        padded = batch(case)
        assert isinstance(padded, SequenceBatch), "no case generates packed"
        ids = enumerate(padded.prompt_ids)
        prompts = [Prompt(index=index, token_ids=row, reference_answer="") for index, row in ids]

        def work() -> None:
            engine.submit(prompts, sampling, seed=0, step=0)
            engine.finished()

        return engine, work


def _EngineWithoutTokenizer(model: ModelSettings, device: torch.device, *, max_prompt_tokens: int) -> Any:  # noqa: N802
    """An engine whose completions never end."""
    from rlinf_workers.engines import HuggingFaceEngine
    from rlinf_workers.models.language_model import LoadedModel, build_model

    loaded = LoadedModel(model=build_model(model, torch.device("cpu")), tokenizer=None, stop_ids=(-1,), pad_id=0)
    return HuggingFaceEngine(loaded, device, max_prompt_tokens=max_prompt_tokens)


def _saved_bytes(heap: ctypes.CDLL, backend: Any) -> int:
    """What the copy of a checkpoint takes at its peak."""
    heap.rlinf_forget_largest()
    live = heap.rlinf_live_bytes()
    copies = backend.model_tensors(), backend.optimizer_tensors()
    taken = heap.rlinf_largest_bytes() - live
    del copies
    return taken


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def run(case: Case) -> dict[str, Any]:
    """One case, counted and measured."""
    with tempfile.TemporaryDirectory() as scratch, launched(LocalLauncher) as launcher:
        make_folder(case.model, f"{scratch}/model")
        counted = count(case, f"{scratch}/model")
        ranks = start(
            launcher,
            Path(scratch),
            Measured,
            num_ranks=case.num_ranks,
            num_ranks_per_replica=case.ranks_per_replica,
        )
        answers = ranks.call("measure", asdict(case), f"{scratch}/model", timeout_s=TIMEOUT_S)
    measured = {key: max(answer[key] for answer in answers) for key in answers[0]}
    num_items = SIZES[case.size][0] if case.role == "rollout" else 1
    peak = counted.peak(num_items)
    return {
        "case": asdict(case),
        "counted_bytes": peak,
        "of_it": counted.parts(num_items),
        "exact_bytes": measured["exact"],
        "begin_bytes": {"counted": counted.state + counted.host_start, "exact": measured["begin"]},
        "state_bytes": {"counted": counted.state, "exact": measured["after"]},
        "saved_bytes": {"counted": counted.host_copy, "exact": measured["saved"]},
        "rss_bytes": measured["rss"],
        "counted_over_exact": round(peak / measured["exact"], 3),
        "rss_over_exact": round(measured["rss"] / measured["exact"], 3),
    }


def main() -> None:
    """Measures what the command line names, or all."""
    pattern = sys.argv[1] if len(sys.argv) > 1 else ""
    for case in (case for case in cases() if pattern in case.name):
        row = run(case)
        print(
            f"{case.name:60} counted {row['counted_bytes'] / 2**20:7.1f} MiB, exact {row['exact_bytes'] / 2**20:7.1f}, "
            f"ratio {row['counted_over_exact']:.3f}, rss {row['rss_over_exact']:.2f} of exact; state "
            f"{row['state_bytes']['counted'] / 2**20:.1f} / {row['state_bytes']['exact'] / 2**20:.1f}; begin "
            f"{row['begin_bytes']['counted'] / 2**20:.1f} / {row['begin_bytes']['exact'] / 2**20:.1f}; saved "
            f"{row['saved_bytes']['counted'] / 2**20:.1f} / {row['saved_bytes']['exact'] / 2**20:.1f}",
            flush=True,
        )
        before = json.loads(RESULT.read_text())["cases"] if RESULT.exists() else {}
        rows = before | {case.name: row}
        case_rows = {case.name: rows[case.name] for case in cases() if case.name in rows}
        RESULT.write_text(json.dumps({"torch": torch.__version__, "cases": case_rows}, indent=1) + "\n")


def _begin() -> None:
    """Makes every process that comes after count its heap, and find this module."""
    source = Path(__file__).with_name("live_bytes.c")
    library = Path(tempfile.mkdtemp(), "live_bytes.so")
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
    os.environ |= {"LD_PRELOAD": str(library), "PYTHONPATH": str(source.parent)}
    os.environ["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "0"  # kernels it compiles for products in bfloat16, 1.5 MB each
    subprocess.run([sys.executable, "-c", "import rank_memory; rank_memory.main()", *sys.argv[1:]], check=True)


if __name__ == "__main__":
    _begin()
