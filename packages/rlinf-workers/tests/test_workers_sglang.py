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
from rlinf_workers.engines.base import UnfinishedCompletion, not_begun
from rlinf_workers.engines.capacity import Capacity
from rlinf_workers.engines.completions import completions_of, sampling_seed
from rlinf_workers.engines.sampling import NoiseKey, SamplingSettings
from rlinf_workers.engines.server_processes import last_error
from rlinf_workers.engines.serving import bound_cores, suspects
from rlinf_workers.engines.sglang.arguments import OWNED, check_names, fraction_of, server_arguments
from rlinf_workers.engines.sglang.experts import ExpertRows
from rlinf_workers.engines.sglang.requests import answer_of, cut_at, request_parameters
from rlinf_workers.engines.sglang.server import _library_path, cuda_libraries, with_hint
from rlinf_workers.engines.sglang.spec import SPEC
from rlinf_workers.errors import SettingsRefused, WorkersError
from rlinf_workers.models.language_model import ModelSettings
from rlinf_workers.roles.records.language import Prompt

KNOWN = ("model_path", "tp_size", "mem_fraction_static", "schedule_policy", "max_total_tokens", "_private")
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


def output(token_ids, reason, logprobs=None):
    logprobs = logprobs or [-0.5] * len(token_ids)
    about = {
        "finish_reason": reason,
        "output_token_logprobs": [(x, t, None) for x, t in zip(logprobs, token_ids, strict=True)],
    }
    return {"output_ids": token_ids, "meta_info": about}


def request(index=0, member=0, num_members=3):
    return not_begun(prompt(index), num_members, NoiseKey(seed=4, step=2, index=index))[member]


def answer(generated, stop_token_ids=(1,), *, policy_version=2, max_new_tokens=40, is_suspended=False, **key) -> Any:
    return answer_of(
        generated,
        request(**key),
        stop_token_ids,
        max_new_tokens=max_new_tokens,
        policy_version=policy_version,
        is_suspended=is_suspended,
    )


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


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("mem_fraction_statik", "did you mean mem_fraction_static?"),
        ("zzz", "launch_server --help"),
        ("_private", "no server argument of that name"),
        ("model_path", "the model and its dtype are those of the run"),
        ("nccl_port", "sockets that it names itself"),
    ],
)
def test_names_that_no_recipe_may_set_are_refused(name, says):
    with pytest.raises(WorkersError, match=f"engine_options.{name}.*") as error:
        check_names([name], KNOWN)
    assert says in str(error.value)


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


def test_each_process_on_cpu_slots_gets_the_core_of_its_slot():
    assert bound_cores(("cpu:2", "cpu:3"), range(8)) == "2|3"
    assert bound_cores(("cpu:2", "cpu:3"), (4, 6)) == "4|6"


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


def test_an_answer_is_truncated_or_ends_with_a_stop_token_or_a_stop_string():
    ended = answer(output([4, 1], {"type": "stop", "matched": 1}), (1,), index=0, member=0)
    cut = answer(output([4, 5], {"type": "length", "length": 2}), (1,), index=0, member=1)
    stopped = cut_at(output([4, 5, 6], {"type": "length", "length": 3}, [-1.0, -2.0, -3.0]), 2)
    of_string = answer(stopped, (1,), index=0, member=2)
    assert [one.truncated for one in (ended, cut, of_string)] == [False, True, False]
    assert of_string.token_ids == [4, 5] and of_string.logprobs == [-1.0, -2.0]


def test_an_answer_lists_which_version_sampled_which_tokens_after_those_before():
    spans = [{"version": "default", "start": 0, "end": 1}, {"version": "3", "start": 1, "end": 9}]
    generated = output([4, 5, 6], {"type": "length", "length": 3})
    generated["meta_info"]["weight_versions"] = spans
    versions = [(one.num_tokens, one.policy_version) for one in answer(generated).segments]
    assert versions == [(1, -1), (2, 3)]
    generated["meta_info"]["weight_versions"] = spans[1:]
    before = replace(
        request(),
        token_ids=torch.tensor([8, 9]),
        logprobs=torch.tensor([-2.0, -3.0]),
        segments=answer(generated).segments,
    )
    whole = answer_of(generated, before, (1,), max_new_tokens=5, policy_version=7)
    assert whole.token_ids == [8, 9, 4, 5, 6] and whole.logprobs == [-2.0, -3.0, -0.5, -0.5, -0.5]


def test_a_suspended_request_is_unfinished_unless_its_last_token_ends_it():
    aborted = output([4, 5], {"type": "abort", "message": "Aborted"})
    unfinished = answer(aborted, is_suspended=True)
    assert isinstance(unfinished, UnfinishedCompletion)
    assert unfinished.token_ids.tolist() == [4, 5] and unfinished.logprobs.tolist() == [-0.5, -0.5]
    assert [(one.num_tokens, one.policy_version) for one in unfinished.segments] == [(2, 2)]
    assert answer(aborted, (5,), is_suspended=True).truncated is False
    assert answer(aborted, max_new_tokens=2, is_suspended=True).truncated is True
    in_queue = {
        "output_ids": [],
        "meta_info": {"finish_reason": {"type": "abort", "message": "Abort in waiting queue"}},
    }
    assert len(answer(in_queue, is_suspended=True).token_ids) == 0


@pytest.mark.parametrize(
    "reason",
    [{"type": "abort", "message": "x"}, {"type": "stop", "matched": "NaN happened"}, {"type": "stop", "matched": 3}],
)
def test_a_request_that_ended_in_another_way_is_an_error(reason):
    with pytest.raises(ValueError, match="prompt 6, completion 1: SGLang ended it with"):
        answer(output([4, 1], reason), (1,), index=6, member=1)


def test_completions_that_came_together_are_rows_of_one_record():
    answers = [
        answer(output([4, 5, 6], {"type": "length", "length": 3}), (1,), index=7, member=2),
        answer(output([4], {"type": "stop", "matched": 4}, [-2.0]), (4,), index=7, member=0),
        answer(output([5], {"type": "length", "length": 1}), (1,), index=8, member=0),
    ]
    whole, other = completions_of(answers)
    assert whole.members == (2, 0) and other.index == 8
    assert whole.token_ids.tolist() == [[4, 5, 6], [4, 0, 0]] and whole.loss_mask.tolist() == [[1, 1, 1], [1, 0, 0]]
    assert whole.logprobs.tolist() == [[-0.5, -0.5, -0.5], [-2.0, 0.0, 0.0]] and whole.truncated.tolist() == [
        True,
        False,
    ]


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
    engine._backs_weights_up, engine._is_saved = True, False
    if is_busy:
        engine._capacity.begin(prompt(0), SAMPLING)
    for _ in range(2):
        engine.offload()
    for _ in range(2):
        engine.onload()
    assert work_names == calls


def test_room_is_what_the_cache_holds_less_what_is_under_way():
    room = Capacity(1000, None)
    assert room.prompts(3) == 1  # nothing is known of prompts yet
    room.begin(prompt(0), SAMPLING)  # 10 + 3 * 20 tokens expected
    assert room.prompts(3) == (1000 - 70) // 70
    for member in range(3):
        room.end(0, member, 5)
    assert room.is_empty and room.prompts(3) == 1000 // (10 + 3 * 5)  # completions are as long as those that ended


def test_room_is_never_refused_to_a_prompt_alone_and_never_beyond_the_users_bound():
    room = Capacity(50, 4)
    room.begin(prompt(0), SAMPLING)
    assert room.prompts(3) == 0
    for member in range(3):
        room.end(0, member, 40)
    assert room.prompts(3) == 1
    room = Capacity(10**6, 4)
    room.begin(prompt(0), SAMPLING)
    assert room.prompts(1) == 1 and room.prompts(3) == 0
    room.end(0, 1, 4)
    assert room.prompts(1) == 2


def test_the_last_error_of_a_process_is_its_exception_without_the_stack(tmp_path):
    (tmp_path / "errors-5").write_text(
        "Scheduler hit an exception: Traceback (most recent call last):\n  File x, line 3\n    f(1)\n"
        "ValueError: too small\n"
        "  because\n\n"
    )
    assert last_error(tmp_path, 5) == "ValueError: too small\n  because"
    assert last_error(tmp_path) == last_error(tmp_path, 5) and last_error(tmp_path, 6) is None


def test_errors_of_sglang_come_with_what_to_do_here():
    assert with_hint("RuntimeError: EADDRINUSE").endswith(
        "another process took the port that SGLang had chosen; start the run again"
    )
    assert with_hint("AssertionError: Memory pool size is too small").endswith("or max_total_tokens on CPU slots")
    assert with_hint("ValueError: else") == "ValueError: else"


@pytest.mark.skipif(importlib.util.find_spec("sglang") is not None, reason="this environment has SGLang")
def test_experts_are_read_for_every_token_that_was_computed():
    rows = ExpertRows.of({"num_local_experts": 8, "num_hidden_layers": 2, "num_experts_per_tok": 2})
    numbers = torch.arange(3 * 2 * 2, dtype=torch.int32) % 8
    about = {"routed_experts": base64.b64encode(numbers.numpy().tobytes()).decode()}
    experts = rows.read(about, 3)
    assert experts.dtype == torch.uint8 and torch.equal(experts, numbers.view(3, 2, 2).to(torch.uint8))
    assert rows.read({"routed_experts": ""}, 0).shape == (0, 2, 2), "a prompt of one token"
    for missing, num_rows in ((about, 4), ({}, 3)):
        with pytest.raises(WorkersError, match="experts, not"):
            rows.read(missing, num_rows)
    config = {"num_experts": 300, "num_hidden_layers": 2, "num_experts_per_tok": 2}
    assert ExpertRows.of(config).dtype == torch.int16
    for changes in ({"num_experts": 0}, {"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}):
        with pytest.raises(SettingsRefused, match="with experts in every layer"):
            ExpertRows.of(config | changes)


def test_experts_of_completions_of_different_lengths_are_padded():
    experts = [torch.full((length - 1, 2, 2), length, dtype=torch.uint8) for length in (3, 1)]
    prompt_experts = torch.ones(10, 2, 2, dtype=torch.uint8)
    answers = [
        replace(
            answer(output(ids, {"type": "stop", "matched": 1}), member=member),
            experts=one,
            prompt_experts=prompt_experts,
        )
        for member, (ids, one) in enumerate(zip(([5, 6, 1], [1]), experts, strict=True))
    ]
    (part,) = completions_of(answers)
    assert part.prompt_experts is prompt_experts and part.experts is not None
    assert part.experts.shape == (2, 2, 2, 2)
    assert part.experts[0].eq(3).all() and not part.experts[1].any()
    assert completions_of([answer(output([1], {"type": "stop", "matched": 1}))])[0].experts is None


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
