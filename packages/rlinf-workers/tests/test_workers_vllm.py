"""The engine `vllm` without vLLM: its arguments, requests and outputs, with fakes of vLLM's engine and records."""

import asyncio
import queue
import random
import threading
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoConfig, SmolVLMVisionConfig
from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionEmbeddings
from workers_vision_folders import tiny_folder

from rlinf_comm import WeightMismatchError
from rlinf_workers.engines.base import UnfinishedCompletion, not_begun
from rlinf_workers.engines.capacity import Capacity
from rlinf_workers.engines.completions import ServerAnswer
from rlinf_workers.engines.inside import Inside
from rlinf_workers.engines.sampling import NoiseKey, SamplingSettings
from rlinf_workers.engines.vllm.arguments import FIXED, ON_CPU, ON_GPU, engine_arguments, env_vars
from rlinf_workers.engines.vllm.engine import VLLMEngine, check_architecture
from rlinf_workers.engines.vllm.options import ARGUMENTS, OWNED, VLLMOptions
from rlinf_workers.engines.vllm.requests import answer_of, request_parameters
from rlinf_workers.engines.vllm.tiles import largest_picture, patch_positions
from rlinf_workers.errors import SettingsRefused, WorkersError
from rlinf_workers.models.language_model import ModelSettings, load_tokenizer
from rlinf_workers.models.picture_processor import PictureProcessor
from rlinf_workers.testing.engines import prompts_of

SAMPLING = SamplingSettings(group_size=2, max_new_tokens=8)
CPU, GPU = torch.device("cpu"), torch.device("cuda:0")


def request(num_tokens: int = 0, member: int = 0) -> UnfinishedCompletion:
    (prompt,) = prompts_of([3])
    begun = not_begun(prompt, 4, NoiseKey(seed=1, step=2, index=0))[member]
    ids, logprobs = torch.arange(num_tokens), torch.full((num_tokens,), -0.5)
    return replace(begun, token_ids=ids, logprobs=logprobs)


def test_every_argument_that_is_read_set_or_kept_back_here_is_one_of_vllms():
    read = {field.name for field in fields(VLLMOptions)}
    assert (read | OWNED.keys() | ON_CPU.keys() | ON_GPU.keys() | FIXED.keys()) <= ARGUMENTS.names
    assert not (ON_CPU.keys() & OWNED.keys()), "a recipe may change a default of a device"


def test_a_recipes_argument_wins_over_what_is_set_for_the_device_and_not_over_ours():
    model = ModelSettings(folder="m", has_weights=False, dtype="bfloat16", seed=1)
    options = {"gpu_memory_utilization": 0.5, "max_num_seqs": 7}
    whole = engine_arguments(model, GPU, num_devices=2, folder="f", engine_options=options)
    assert (whole["gpu_memory_utilization"], whole["max_num_seqs"], whole["enable_sleep_mode"]) == (0.5, 7, True)
    assert (whole["load_format"], whole["distributed_executor_backend"]) == ("rlinf_dummy", "mp")
    on_cpu = engine_arguments(model, CPU, num_devices=1, folder="f", engine_options={})
    assert on_cpu["distributed_executor_backend"] == "uni" and "enable_sleep_mode" not in on_cpu
    assert env_vars(CPU, "3")["VLLM_CPU_OMP_THREADS_BIND"] == "3" and "VLLM_CPU_OMP_THREADS_BIND" not in env_vars(
        GPU, ""
    )


def test_an_architecture_that_was_not_tried_is_refused():
    with pytest.raises(SettingsRefused, match="not been tried with DeepseekV3ForCausalLM"):
        check_architecture({"architectures": ["DeepseekV3ForCausalLM"]}, CPU)


@pytest.mark.parametrize("behind_a_tower", [False, True])
def test_heads_that_its_kernels_on_a_cpu_cannot_compute_are_refused(behind_a_tower):
    sizes = {"hidden_size": 96, "num_attention_heads": 4}
    config = {"architectures": ["Qwen2ForCausalLM"], **({"text_config": sizes} if behind_a_tower else sizes)}
    check_architecture(config, GPU)
    with pytest.raises(SettingsRefused, match="those of the model have 24"):
        check_architecture(config, CPU)


def test_requests_say_how_to_sample_and_have_seeds_of_their_own():
    settings = replace(SAMPLING, temperature=0.5, top_k=4)
    parameters = [request_parameters(request(member=member), settings, (1, 7)) for member in range(3)]
    assert len({one["seed"] for one in parameters}) == 3
    first = parameters[0]
    assert (first["temperature"], first["top_k"], first["stop_token_ids"]) == (0.5, 4, [1, 7])
    continued = request_parameters(request(3), settings, (1,))
    assert continued["max_tokens"] == 5
    assert continued["seed"] != first["seed"], "its first token would have the noise of the completion's first"


def test_an_output_of_vllm_is_an_answer():
    """As its CompletionOutput, FlatLogprobs and spans of versions."""
    spans = [SimpleNamespace(version="default", end=1), SimpleNamespace(version="7", end=3)]
    about = {"finish_reason": "stop", "stop_reason": 6, "weight_versions": spans}
    output = SimpleNamespace(token_ids=[4, 5, 6], logprobs=SimpleNamespace(logprobs=[-1.0, -2.0, -3.0]), **about)
    assert answer_of(output) == ServerAnswer(
        token_ids=[4, 5, 6], logprobs=[-1.0, -2.0, -3.0], versions=[(1, "default"), (3, "7")], reason="stop", details=6
    )


@pytest.mark.parametrize("side", [4, 27])
@torch.no_grad()
def test_patches_of_tiles_are_at_the_positions_of_transformers(side):
    """Its embedding returns them if its table has its own indices. The last tiles have patches beside the picture."""
    config = SmolVLMVisionConfig(hidden_size=1, image_size=2 * side, patch_size=2)
    embeddings = SmolVLMVisionEmbeddings(config)
    embeddings.position_embedding.weight.copy_(torch.arange(side**2)[:, None])
    is_patch = torch.zeros(side + 1, side, side, dtype=torch.bool)
    for tile in range(side):
        is_patch[tile, : side - tile, : 1 + tile // 2] = True
    is_patch[side] = True
    pixels = torch.zeros(side + 1, 3, 2 * side, 2 * side)
    expected = embeddings(pixels, is_patch)[..., 0] - embeddings.patch_embedding.bias
    assert torch.equal(patch_positions(is_patch, side=side), expected.round().long())


def test_the_largest_picture_has_as_many_features_as_the_processor_makes(tmp_path):
    folder = tiny_folder(tmp_path, "smolvlm")
    processor = PictureProcessor(folder, load_tokenizer(folder))
    sizes = [(64, 64), (500, 490), (30, 64), (9, 9)]
    pictures = [processor._run_on(images=[Image.new("RGB", size)]) for size in sizes]
    counts = [int((one.token_ids == processor.placeholder_id).sum()) for one in pictures]
    model = SimpleNamespace(tokenizer=folder, hf_config=AutoConfig.from_pretrained(folder))
    processing = SimpleNamespace(ctx=SimpleNamespace(model_config=model))
    assert largest_picture(processing, 100, {}) == {"image": max(counts)}
    model.hf_config.model_type = "idefics3"
    assert largest_picture(processing, 100, {}) is None


class FakeAsyncLLM:
    """As much of vLLM's AsyncLLM as pauses, versions and sleeps need, and of the server around it."""

    num_sequence_tokens = num_tokens = 1000

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.engine = self
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def run(self, work: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(10)

    def stop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.calls.append(("pause", mode, clear_cache))

    async def resume_generation(self) -> None:
        self.calls.append("resume")

    async def reset_encoder_cache(self):
        self.calls.append("forget pictures")

    async def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        self.calls.append("reset")
        return True

    async def update_weight_version(self, version: str) -> None:
        self.calls.append(("version", version))

    async def sleep(self, *, level: int, mode: str) -> None:
        self.calls.append(("sleep", level, mode))

    async def wake_up(self, tags: list[str] | None = None) -> None:
        self.calls.append(("wake", tags))

    def call(self, method: str) -> None:
        self.calls.append(method)


@pytest.fixture
def engine():
    new: Any = object.__new__(VLLMEngine)
    new._server = new._processes = FakeAsyncLLM()
    new._capacity, new._lost, new._results = Capacity(1000, None), None, queue.SimpleQueue()
    new._options, new._on_new_weights = {}, None
    new._sees = True
    new._gives_memory_back, new._is_away, new._waits, new._is_saved, new._has_weights = True, False, False, False, True
    yield new
    new._server.stop()


@pytest.mark.parametrize(
    ("how", "calls"),
    [
        ("recompute", [("pause", "keep", True), "reset", "forget pictures", ("version", "5"), "resume"]),
        ("keep", [("pause", "keep", False), "forget pictures", ("version", "5"), "resume"]),
    ],
)
def test_a_pause_takes_weights_and_goes_on(engine, how, calls):
    engine._options = {"enable_prefix_caching": False}
    engine._capacity.begin(prompts_of([4])[0], SAMPLING)
    engine.pause(how)
    engine.weights_received(5)
    engine.resume()
    assert engine._server.calls == [one for one in calls if one != "resume"] + ["resume"]


def test_prompts_of_earlier_weights_are_not_kept_with_running_completions(engine):
    with pytest.raises(ValueError, match=r"engine_options\.enable_prefix_caching=false, or use recompute"):
        engine.pause("keep")


def test_weights_are_compared_after_a_wake_and_before_requests_go_on(engine):
    engine.offload()
    engine.onload()
    assert engine._server.calls == [
        "remember",
        ("sleep", 1, "keep"),
        ("wake", ["weights"]),
        "check_remembered",
        ("wake", None),
        "resume",
    ]


def test_no_copy_of_the_weights_is_made_where_a_sync_fills_them(engine):
    """Unless completions in flight go on with them."""
    asleep, awake = ("sleep", 2, "keep"), [("wake", ["weights"]), ("wake", None), "resume"]
    engine.discard()
    engine.onload()
    assert engine._server.calls == [asleep, *awake]
    with pytest.raises(WorkersError, match="none have been received"):
        engine.submit(prompts_of([4]), SAMPLING, seed=1, step=0)
    engine.weights_received(5)
    engine._capacity.begin(prompts_of([4])[0], SAMPLING)
    engine._server.calls.clear()
    engine.discard()
    assert engine._server.calls == ["remember", ("sleep", 1, "keep")]


def test_each_of_1000_bits_that_flip_while_an_engine_sleeps_is_named():
    torch.manual_seed(0)
    weights = {f"layer.{i}": torch.randn(3, 5, dtype=dtype) for i, dtype in enumerate([torch.float32, torch.bfloat16])}
    model: Any = SimpleNamespace(named_parameters=lambda: iter(weights.items()))
    inside = Inside(connection=None, model=model, sizes={})  # type: ignore[arg-type]
    inside.remember()
    inside.check_remembered()
    choose = random.Random(1)
    for _ in range(1000):
        name = choose.choice(list(weights))
        bits = weights[name].view(-1).view(torch.uint8)
        place, bit = choose.randrange(len(bits)), 1 << choose.randrange(8)
        bits[place] ^= bit
        with pytest.raises(WeightMismatchError, match=name) as raised:
            inside.check_remembered()
        assert raised.value.tensors == (name,)
        bits[place] ^= bit
    inside.check_remembered()
