"""How long a new version takes into SGLang or vLLM: straight into its process, attested, against the engine's own ways.

    python -m benchmarks.throughput.engine_sync vllm --num-layers 6 --num-rounds 5      writes results/ENGINE-sync.json

Qwen2-1.5B's sizes in bfloat16 with random weights and fewer layers, on CPU slots; needs the engine in the venv. The
trainer is this process and holds whole weights. In each round it changes them, and then each side sends them:

    rlinf              sync `shared`: lent, filled in place in the engine's process, checked there
    from_disk          SGLang's update_weights_from_disk, vLLM's reload_weights: the files are there already; unchecked
    saved_and_from_disk   the same with the writing of the files
    flattened_bucket   SGLang: update_weights_from_tensor with FlattenedTensorBucket, through shared memory; unchecked
    collective_rpc     vLLM: a worker's method that reloads tensors in shared memory; unchecked
    broadcast          vLLM: as its NCCL transfer does, over gloo: a broadcast for each tensor; unchecked

vLLM's own ways go into an engine with its own loader, which arranges weights for its kernels; `rlinf` into one that
leaves them plain.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
import threading
import time
from abc import ABC, abstractmethod
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from benchmarks.harness import Step, compare, interleave, report
from benchmarks.throughput.vllm_peer import Peer, broadcast, join
from safetensors.torch import save_file

from rlinf_comm.weights import Layout, reshard_plan, specs_of
from rlinf_workers.engines.processes import EngineProcesses
from rlinf_workers.engines.sglang.loader import LOADER
from rlinf_workers.engines.vllm.arguments import engine_arguments
from rlinf_workers.engines.vllm.engine import known_arguments
from rlinf_workers.engines.vllm.server import VLLMServer
from rlinf_workers.leftovers import SweptFolder
from rlinf_workers.models import ModelSettings
from rlinf_workers.weight_sync import WeightPort
from rlinf_workers.weight_sync.shared.sync import SharedWeightSync

EDGE = "actor -> rollout"
NUM_WARMUP = 2  # the first rounds touch memory for the first time, on all sides
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 1536,
    "intermediate_size": 8960,
    "num_attention_heads": 12,
    "num_key_value_heads": 2,
    "vocab_size": 151936,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "eos_token_id": 1,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", choices=sorted(ENGINES))
    parser.add_argument("--num-layers", type=int, default=6)
    parser.add_argument("--num-rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(CONFIG | {"num_hidden_layers": options.num_layers}))
        sync = ENGINES[options.engine](Path(folder))
        sides: dict[str, Step] = {"rlinf": sync.straight, **sync.own_ways(), "from_disk": sync.from_disk}
        samples_s = interleave(sides, num_warmup=NUM_WARMUP, num_rounds=options.num_rounds)
        saved_s, check_s, fill_s = (one[NUM_WARMUP:] for one in (sync.saved_s, sync.check_s, sync.fill_s))
        samples_s["saved_and_from_disk"] = [a + b for a, b in zip(samples_s["from_disk"], saved_s, strict=True)]
        report(
            f"{options.engine}-sync",
            settings=vars(options) | {"output": None, "config": CONFIG},
            samples_s=samples_s,
            comparisons=[compare(samples_s, side, "rlinf") for side in samples_s if side != "rlinf"],
            findings={
                "num_bytes": sum(tensor.nbytes for tensor in sync.weights.values()),
                "check_s": check_s,
                "fill_s": fill_s,
            },
            output=options.output,
        )
        sync.close()


class Sync(ABC):
    """A trainer with whole weights, and a running engine."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.start()
        processes = EngineProcesses(1, self.enter)
        layout = processes.layout(ModelSettings(folder=str(folder), has_weights=False, dtype="bfloat16"))
        generator = torch.Generator().manual_seed(1)
        self.weights = {
            name: torch.empty(spec.shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)
            for name, spec in layout.specs.items()
        }
        reshard = reshard_plan(Layout.replicated(specs_of(self.weights), 1), layout)
        self.sync = SharedWeightSync(EDGE, reshard)

        def port(side: Any) -> WeightPort:
            return WeightPort(
                edge=EDGE, side=side, rank=0, reshard=reshard, weight_sync="shared", address=self.sync.address
            )

        self.sender = SharedWeightSync.open_sender(port("send"))
        self.receiver = processes.open_receiver([port("receive")])
        self.fill_s: list[float] = []
        self.check_s: list[float] = []
        self.saved_s: list[float] = []

    def straight(self, round_index: int) -> float:
        for tensor in self.weights.values():
            tensor.mul_(1.01)
        start_s = time.perf_counter()
        finish_reads = self.sender.publish(self.weights, round_index + 1)
        check = self.receiver.receive({}, round_index + 1)
        filled_s = time.perf_counter()
        check()
        end_s = time.perf_counter()
        finish_reads()
        self.fill_s.append(filled_s - start_s)
        self.check_s.append(end_s - filled_s)
        return end_s - start_s

    def from_disk(self, round_index: int) -> float:
        start_s = time.perf_counter()
        save_file(self.weights, self.folder / "model.safetensors", {"format": "pt"})
        saved_s = time.perf_counter()
        self.reload()
        self.saved_s.append(saved_s - start_s)
        return time.perf_counter() - saved_s

    @abstractmethod
    def start(self) -> None:
        """Starts what the weights go into, with the folder's config and any weights."""

    @abstractmethod
    def enter(self, ticket: str) -> None:
        """As in `EngineProcesses`."""

    @abstractmethod
    def reload(self) -> None:
        """Loads the folder's files."""

    @abstractmethod
    def own_ways(self) -> dict[str, Step]:
        """Further ways of the engine."""

    @abstractmethod
    def close(self) -> None: ...


class SGLangSync(Sync):
    def start(self) -> None:
        os.environ["SGLANG_USE_CPU_ENGINE"] = "1"
        import sglang  # pyright: ignore[reportMissingImports]

        self.engine = sglang.Engine(
            model_path=str(self.folder),
            load_format="dummy",
            device="cpu",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            disable_cuda_graph=True,
            disable_overlap_schedule=True,
            attention_backend="torch_native",
            sampling_backend="pytorch",
            grammar_backend="none",
            mem_fraction_static=0.5,
            max_total_tokens=512,
            max_running_requests=4,
            log_level="error",
            sleep_on_idle=True,
            custom_weight_loader=[LOADER],
        )

    def enter(self, ticket: str) -> None:
        self._update([(ticket, torch.empty(0))], LOADER)

    def reload(self) -> None:
        _succeeded(self.engine.update_weights_from_disk(str(self.folder), load_format="auto"))

    def own_ways(self) -> dict[str, Step]:
        return {"flattened_bucket": self._flattened_bucket}

    def close(self) -> None:
        self.engine.shutdown()

    def _flattened_bucket(self, round_index: int) -> float:
        from sglang.srt.utils import MultiprocessingSerializer  # pyright: ignore[reportMissingImports]
        from sglang.srt.weight_sync.tensor_bucket import (  # pyright: ignore[reportMissingImports]
            FlattenedTensorBucket,
        )

        start_s = time.perf_counter()
        bucket = FlattenedTensorBucket(named_tensors=list(self.weights.items()))
        content = {"flattened_tensor": bucket.get_flattened_tensor(), "metadata": bucket.get_metadata()}
        payload = MultiprocessingSerializer.serialize(content)
        self._update([payload], "flattened_bucket")
        return time.perf_counter() - start_s

    def _update(self, tensors: Any, load_format: str) -> None:
        _succeeded(self.engine.begin_weight_update())
        _succeeded(self.engine.update_weights_from_tensor(tensors, load_format=load_format))
        _succeeded(self.engine.end_weight_update())


class VLLMSync(Sync):
    """Two engines: one as RLinf starts it, one with vLLM's own loader."""

    def start(self) -> None:
        device = torch.device("cpu")
        known_arguments(device, ("cpu:0",), any_version=False)
        torch.multiprocessing.set_sharing_strategy("file_system")  # handles are names, for any process
        model = ModelSettings(folder=str(self.folder), has_weights=False, dtype="bfloat16")
        sizes = {"kv_cache_memory_bytes": 32 << 20, "max_model_len": 512}
        arguments = engine_arguments(model, device, num_devices=1, folder=str(self.folder), engine_options=sizes)
        self.arguments = arguments | {
            "load_format": "auto",
            "worker_extension_cls": f"{Peer.__module__}.{Peer.__name__}",
        }
        self.servers = [VLLMServer(arguments, SweptFolder("rlinf-sync-"), self._lost)]
        self.group: Any = None

    def enter(self, ticket: str) -> None:
        self._call(0, "rlinf_enter", ticket)

    def reload(self) -> None:
        self._call(1, "reload_weights", None, str(self.folder))

    def own_ways(self) -> dict[str, Step]:
        save_file(self.weights, self.folder / "model.safetensors", {"format": "pt"})  # vLLM reloads no dummy
        self.servers.append(VLLMServer(self.arguments, SweptFolder("rlinf-sync-"), self._lost))
        return {"collective_rpc": self._with_the_call, "broadcast": self._broadcast}

    def close(self) -> None:
        for server in self.servers:
            server.close()

    def _with_the_call(self, round_index: int) -> float:
        start_s = time.perf_counter()
        shared = [(name, tensor.clone().share_memory_()) for name, tensor in self.weights.items()]
        self._call(1, "peer_load", bytes(ForkingPickler.dumps(shared)))
        return time.perf_counter() - start_s

    def _broadcast(self, round_index: int) -> float:
        if self.group is None:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            joins = self._start_call(1, "peer_join", "127.0.0.1", port)
            self.group = join("127.0.0.1", port, rank=0)
            joins.join()
        start_s = time.perf_counter()
        metadata = [(name, list(tensor.shape), "bfloat16") for name, tensor in self.weights.items()]
        receives = self._start_call(1, "peer_receive", metadata)
        for tensor in self.weights.values():
            broadcast(self.group, tensor)
        receives.join()
        return time.perf_counter() - start_s

    def _call(self, server: int, method: str, *arguments: Any) -> None:
        one = self.servers[server]
        one.run(one.engine.collective_rpc(method, args=arguments))

    def _start_call(self, server: int, method: str, *arguments: Any) -> threading.Thread:
        thread = threading.Thread(target=self._call, args=(server, method, *arguments))
        thread.start()
        return thread

    @staticmethod
    def _lost(error: Exception) -> None:
        print(error, flush=True)
        os._exit(1)


ENGINES: dict[str, type[Sync]] = {"sglang": SGLangSync, "vllm": VLLMSync}


def _succeeded(answer: tuple[Any, ...]) -> None:
    assert answer[0], f"SGLang refused: {answer[1]}"


if __name__ == "__main__":
    main()
