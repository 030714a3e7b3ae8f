"""What of the engine `sglang` needs no SGLang: arguments, requests, room. The engine itself: engine_tests/."""

import base64
import importlib.util
import json
import os
from dataclasses import replace
from typing import Any

import pytest
import torch

from rlinf_sched.derive import ModelShape
from rlinf_workers.engines.base import not_begun
from rlinf_workers.engines.capacity import Capacity
from rlinf_workers.engines.completions import ServerAnswer, sampling_seed
from rlinf_workers.engines.sampling import NoiseKey, SamplingSettings
from rlinf_workers.engines.serving import suspects
from rlinf_workers.engines.sglang.arguments import fraction_of, server_arguments
from rlinf_workers.engines.sglang.experts import ExpertRows
from rlinf_workers.engines.sglang.options import OWNED
from rlinf_workers.engines.sglang.requests import answer_of, request_parameters
from rlinf_workers.engines.sglang.server import _library_path, cuda_libraries
from rlinf_workers.engines.sglang.spec import SPEC
from rlinf_workers.errors import SettingsRefused, WorkersError
from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.roles.records.language import Prompt

SAMPLING = SamplingSettings(group_size=3, max_new_tokens=40)


def arguments(
    tmp_path,
    device="cpu",
    static_fraction=None,
    quantization=None,
    has_weights=False,
    model_type="qwen2",
    **engine_options,
):
    config = {"max_position_embeddings": 64, "model_type": model_type}
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = ModelSettings(folder=str(tmp_path), has_weights=has_weights, dtype="bfloat16", quantization=quantization)
    return server_arguments(
        model,
        torch.device(device),
        num_devices=2,
        folder=str(tmp_path),
        loader="a.b",
        stop_token_ids=(1, 7),
        engine_options=engine_options,
        static_fraction=static_fraction,
    )


def request(index=0, member=0, num_members=3):
    return not_begun(prompt(index), num_members, NoiseKey(seed=4, step=2, index=index))[member]


def prompt(index, length=10):
    return Prompt(index=index, token_ids=torch.arange(length), reference_answer="")


def test_a_recipes_argument_wins_over_what_is_set_for_the_device(tmp_path):
    args = arguments(tmp_path, max_total_tokens=77, schedule_policy="lpm")
    assert (args["max_total_tokens"], args["schedule_policy"]) == (77, "lpm")
    assert args["attention_backend"] == "torch_native" and args["tp_size"] == 2 and args["dtype"] == "bfloat16"
    assert args["load_format"] == "dummy" and args["custom_weight_loader"] == ["a.b"] and args["context_length"] > 64
    assert json.loads(args["json_model_override_args"]) == {"eos_token_id": [1, 7]}


def test_memory_on_gpus_can_be_given_back_and_nothing_of_cpus_is_set(tmp_path):
    args = arguments(tmp_path, "cuda")
    assert args["enable_memory_saver"] and args["device"] == "cuda"
    assert not args.get("enable_weights_cpu_backup"), "a sync fills them"
    assert args["mem_fraction_static"] == 0.7, "what a plan counts"
    assert "attention_backend" not in args and "max_total_tokens" not in args
    assert "mm_feature_transport" not in args
    assert arguments(tmp_path, "cuda", model_type="qwen3_vl")["mm_feature_transport"] == "cpu"


@pytest.mark.parametrize("model_type", ["deepseek_v3", "glm4_moe", "unknown"])
def test_sglang_copies_what_it_computed_from_weights_when_it_releases_them(model_type, tmp_path):
    """As with latent attention: no parameter holds it, so the engine's copies of parameters would not restore it."""
    assert arguments(tmp_path, "cuda", model_type=model_type)["enable_weights_cpu_backup"]
    assert "enable_weights_cpu_backup" not in arguments(tmp_path, model_type=model_type)


def test_the_share_of_what_is_free_holds_the_planned_bytes(tmp_path):
    """SGLang's pool is what is free after loading, less the part of what was free before that the share leaves out."""
    static, others = 3_500 << 20, 20 << 30
    for free in (80 << 30, (80 << 30) - others, 9 << 30):
        share = fraction_of(static, free)
        at_start = free - (1 << 30)  # a context
        after_loading = at_start - (1_000 << 20) - (300 << 20)  # weights, and what loading leaves
        pool = after_loading - (1 - share) * at_start
        assert 2_500 << 20 <= pool < 2 * (2_500 << 20), free
    assert fraction_of(static, 1 << 30) < 1, "SGLang says itself that this is too little"
    assert arguments(tmp_path, "cuda")["mem_fraction_static"] == 0.7
    assert arguments(tmp_path, "cuda", static_fraction=0.1)["mem_fraction_static"] == 0.1
    assert arguments(tmp_path, "cuda", static_fraction=0.1, mem_fraction_static=0.4)["mem_fraction_static"] == 0.4


def test_nothing_that_is_set_here_for_a_device_is_refused_to_a_recipe(tmp_path):
    ours = {"context_length", "model_impl", "log_level"}
    assert not ours & OWNED.keys()
    assert arguments(tmp_path).keys() - OWNED.keys() >= ours


def test_what_sglang_refuses_is_led_back_to_a_key():
    engine_options = {"attention_backend": "nonsense", "max_total_tokens": 200}
    assert suspects("Invalid attention backend: nonsense", engine_options).endswith(
        "with engine_options.attention_backend=nonsense"
    )
    assert suspects("it failed", engine_options).endswith("=nonsense, engine_options.max_total_tokens=200")
    assert suspects("it failed", {}) == ""


def test_requests_say_how_to_sample_and_differ_in_their_seed():
    settings = replace(SAMPLING, temperature=0.5, top_p=0.9, min_p=0.1)
    parameters = [request_parameters(request(9, member), settings, (1, 7)) for member in range(3)]
    assert [one["sampling_seed"] for one in parameters] == [sampling_seed(4, 2, 9, member) for member in range(3)]
    assert (
        len({sampling_seed(*key) for key in [(4, 2, 9, 0), (4, 2, 9, 1), (4, 2, 8, 0), (4, 3, 9, 0), (5, 2, 9, 0)]})
        == 5
    )
    assert {one["temperature"] for one in parameters} == {0.5} and parameters[0]["stop_token_ids"] == [1, 7]
    assert parameters[0]["top_p"] == 0.9 and parameters[0]["min_p"] == 0.1
    assert (
        parameters[0]["top_k"] == -1 and request_parameters(request(), replace(settings, top_k=5), (1,))["top_k"] == 5
    )


def test_an_output_of_sglang_is_an_answer():
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 9}]
    logprobs = [(-1.0, 4, None), (-2.0, 6, None)]
    reason = {"type": "stop", "matched": 6}
    about = {"finish_reason": reason, "weight_versions": spans, "output_token_logprobs": logprobs}
    assert answer_of({"output_ids": [4, 6], "meta_info": about}) == ServerAnswer(
        token_ids=[4, 6], logprobs=[-1.0, -2.0], versions=[(1, "default"), (9, "3")], reason="stop", details=6
    )
    in_queue = {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}}
    assert answer_of({"output_ids": [], "meta_info": in_queue}) == ServerAnswer(
        token_ids=[], logprobs=[], versions=[], reason="abort", details="Abort in waiting queue"
    )


@pytest.mark.parametrize(
    ("gives_back", "is_busy", "calls"),
    [
        (True, False, ["_release", "_resume"]),
        (True, True, ["_release", "_resume", "_continue"]),
        (False, True, ["_pause", "_continue"]),
        (False, False, []),
    ],
)
def test_an_offload_on_cpu_slots_pauses_what_is_under_way_and_asks_for_no_memory(gives_back, is_busy, calls):
    from rlinf_workers.engines.sglang.engine import SGLangEngine

    work_names = []

    class Server:
        def run(self, work):
            work_names.append(work.__name__)
            work.close()

    engine: Any = object.__new__(SGLangEngine)
    engine._server, engine._capacity, engine._lost = Server(), Capacity(1000, None), None
    engine._gives_memory_back, engine._is_away, engine._waits = gives_back, False, False
    engine._backs_weights_up, engine._is_saved, engine._has_weights = True, False, True
    if is_busy:
        engine._capacity.begin(prompt(0), SAMPLING)
    for _ in range(2):
        engine.offload()
    for _ in range(2):
        engine.onload()
    assert work_names == calls


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="this environment has SGLang")
def test_experts_are_read_for_every_token_that_was_computed():
    rows = ExpertRows.of({"num_local_experts": 8, "num_hidden_layers": 2, "num_experts_per_tok": 2})
    numbers = torch.arange(3 * 2 * 2, dtype=torch.int32) % 8
    encoded = base64.b64encode(numbers.numpy().tobytes()).decode()
    experts = rows.read(encoded, 3)
    assert experts.dtype == torch.uint8 and torch.equal(experts, numbers.view(3, 2, 2).to(torch.uint8))
    assert rows.read("", 0).shape == (0, 2, 2), "a prompt of one token"
    for missing, num_rows in ((encoded, 4), (None, 3)):
        with pytest.raises(WorkersError, match="experts, not"):
            rows.read(missing, num_rows)
    config = {"num_experts": 300, "num_hidden_layers": 2, "num_experts_per_tok": 2}
    assert ExpertRows.of(config).dtype == torch.int16
    for changes in ({"num_experts": 0}, {"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}):
        with pytest.raises(SettingsRefused, match="with experts in every layer"):
            ExpertRows.of(config | changes)


def test_a_process_that_starts_finds_the_libcudart_of_pip(tmp_path, monkeypatch):
    for folder in ("cuda_runtime", "cu13", "cudnn"):
        (tmp_path / folder / "lib").mkdir(parents=True)
    (tmp_path / "cu13/lib/libcudart.so.13").touch()
    (tmp_path / "cudnn/lib/libcudnn.so.9").touch()
    folders = cuda_libraries([str(tmp_path)])
    assert folders == [str(tmp_path / "cu13/lib")]
    monkeypatch.setenv("LD_LIBRARY_PATH", "/opt/own")
    with _library_path(folders):
        assert os.environ["LD_LIBRARY_PATH"] == f"/opt/own:{folders[0]}", "the user's own come first"
    assert os.environ["LD_LIBRARY_PATH"] == "/opt/own"
    monkeypatch.delenv("LD_LIBRARY_PATH")
    with _library_path(folders):
        assert os.environ["LD_LIBRARY_PATH"] == folders[0]
    assert "LD_LIBRARY_PATH" not in os.environ


def test_an_environment_without_sglang_is_named_before_anything_starts(tmp_path):
    from rlinf_workers.engines.sglang.engine import SGLangEngine

    model = ModelSettings(folder=str(tmp_path), has_weights=True)
    with pytest.raises(WorkersError, match="not installed in the venv of the rollout"):
        SGLangEngine(model, torch.device("cpu"), max_prompt_tokens=8)


def test_fp8_blocks_are_configured_and_the_files_are_not_read(tmp_path):
    """SGLang takes the model for an FP8 checkpoint, whose weights the first sync brings."""
    plain, quantized = (
        arguments(tmp_path, "cuda", quantization=quantization, has_weights=True) for quantization in (None, "fp8")
    )
    config = json.loads(quantized.pop("json_model_override_args"))
    assert config.pop("quantization_config") == {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "weight_block_size": [128, 128],
    }
    assert config == json.loads(plain.pop("json_model_override_args"))
    assert (plain.pop("load_format"), quantized.pop("load_format")) == ("auto", "dummy")
    assert quantized == plain


@pytest.mark.parametrize(
    ("tensor_parallel", "on_gpu", "problem"),
    [
        (1, True, None),
        (2, True, None),
        (4, True, "256 rows of key heads over rollout.tensor_parallel_size=4"),
        (1, False, "SGLang serves FP8 on GPUs alone"),
    ],
)
def test_models_whose_shards_cut_through_blocks_are_refused_and_so_are_cpu_slots(tensor_parallel, on_gpu, problem):
    shape = ModelShape(
        name="small", num_layers=2, hidden_size=512, intermediate_size=1024, num_heads=8, num_kv_heads=2, head_dim=128,
        vocab_size=64,
    )  # fmt: skip
    text = SPEC.quantization_problem(shape, tensor_parallel, on_gpu=on_gpu)
    assert text is None if problem is None else problem in str(text)
