"""Recipes that generate by SGLang: their keys, their memory and plans, and how mistakes end before anything starts."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from rlinf.cli.main import main
from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.config.reasoning import ReasoningConfig
from rlinf.errors import UserError
from rlinf.jobs import generation
from rlinf.jobs.generation import engine_options
from rlinf.jobs.reasoning.flow import job_shape
from rlinf.jobs.reasoning.memory import ReasoningMemory, loads_of
from rlinf.planning.problems import problem_of_recipe
from rlinf_sched import Cluster, Plan, StagePlan
from rlinf_sched.derive import JobShape, find_model
from rlinf_sched.derive.generation import FLOAT32_RATE, FLOAT32_UTILISATION
from rlinf_sched.derive.steps import launch_s
from rlinf_sched.derive.training import DENSE_UTILISATION
from rlinf_workers.engines.sglang.arguments import ON_CPU, ON_GPU
from rlinf_workers.engines.sglang.memory import gpu_sizes, kv_tokens
from rlinf_workers.engines.sglang.options import ARGUMENTS, OWNED, SGLangOptions
from rlinf_workers.engines.sglang.spec import SPEC as SGLANG_SPEC
from rlinf_workers.launchers import Interpreter

pytestmark = pytest.mark.usefixtures("brief_search")

SGLANG = ["--sft_warm_up=null", "--rollout.engine=sglang", "--mode=collocated"]
MODEL = find_model("Qwen2.5-7B")
H100_BYTES = 80 * 10**9
WEIGHTS = 2 * MODEL.num_parameters
TOKEN_BYTES = 2 * 28 * 4 * 128 * 2
"""Keys and values of a token of Qwen2.5-7B: 28 layers, 4 KV heads of 128, bfloat16."""


def config_of(*overrides: str) -> ReasoningConfig:
    config = load_config("sort-grpo", parse_overrides([*SGLANG, *overrides]))
    assert isinstance(config, ReasoningConfig)
    return config


def plan_of(*, span: int = 1, num_devices: int = 2, offload: bool = True) -> Plan:
    devices = tuple(range(num_devices))
    ranks = {"rollout": num_devices // span, "actor": num_devices}
    stages = tuple(
        StagePlan(stage=name, devices=devices, num_ranks=count, granularity=0, offload=offload, turn=turn)
        for turn, (name, count) in enumerate(ranks.items())
    )
    return Plan(flow="grpo", mode="collocated", stages=stages, reason="")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (
            ["--rollout.engine=huggingface", "--rollout.engine_options={mem_fraction_static: 0.5}"],
            "rollout.engine_options.mem_fraction_static: huggingface has no option of that name",
        ),
        (
            ["--rollout.engine=huggingface", "--rollout.tensor_parallel_size=2"],
            "rollout.tensor_parallel_size=2: rollout.engine=huggingface computes on one device",
        ),
        (
            ["--rollout.engine_options={tp_size: 2}"],
            "rollout.engine_options.tp_size cannot be set: an engine has tensor_parallel_size devices",
        ),
        (
            ["--rollout.engine_options={dtype: float16}"],
            "rollout.engine_options.dtype cannot be set: the model and its dtype are those of the run",
        ),
        (
            ["--rollout.engine_options={max_toatl_tokens: 500}"],
            "max_toatl_tokens: SGLang has no server argument of that name; did you mean",
        ),
        (
            ["--rollout.engine_options={zzz: 1}"],
            "no server argument of that name; `python -m sglang.launch_server --help`",
        ),
        (["--rollout.engine_options={model_path: x}"], "rollout.engine_options.model_path cannot be set"),
        (
            ["--rollout.engine_options={mem_fraction_static: 70}"],
            "mem_fraction_static=70 is not a fraction; use a number between 0",
        ),
        (["--rollout.engine_options={max_total_tokens: 0}"], "max_total_tokens=0 is not a number of at least 1"),
        (
            ["--rollout.engine_options={max_total_tokens: 20}"],
            "max_total_tokens=20 is less than rollout.max_prompt_tokens + rollout.max_new_tokens = 25; use at least 25",
        ),
        (["--rollout.engine_options={context_length: 24}"], "context_length=24 is less than"),
        (
            ["--rollout.tensor_parallel_size=2", "--cluster.num_devices=1"],
            "=2: cluster.num_devices gives the rollout 1 device, and an engine has 2; use 2 devices",
        ),
        (
            ["--rollout.tensor_parallel_size=2", "--cluster.num_devices=5"],
            "gives the rollout 5 devices, and an engine has 2; use 4 or 6 devices",
        ),
        (
            ["--rollout.tensor_parallel_size=2", "--plan.devices={rollout: [0, 1, 2]}", "--cluster.num_devices=4"],
            "plan.devices.rollout gives the rollout 3 devices",
        ),
    ],
)
def test_a_setting_that_cannot_be_is_refused_by_its_key(arguments: list[str], says: str):
    with pytest.raises(UserError) as caught:
        config_of(*arguments)
    assert says in " ".join(str(caught.value).split())


def test_a_version_that_nobody_tried_checks_its_own_names():
    config_of("--rollout.engine_options={any_version: true, of_tomorrow: 1}")
    with pytest.raises(UserError, match="of_tomorrow"):
        config_of("--rollout.engine_options={any_version: false, of_tomorrow: 1}")


def test_every_argument_that_is_read_set_or_kept_back_here_is_one_of_sglangs():
    read = {field.name for field in fields(SGLangOptions)}
    assert (read | OWNED.keys() | ON_CPU.keys() | ON_GPU.keys()) <= ARGUMENTS.names


def test_an_argument_may_be_a_list():
    assert config_of("--rollout.engine_options={cuda_graph_bs_decode: [1, 2]}").rollout.engine_options == {
        "cuda_graph_bs_decode": [1, 2]
    }


def test_evaluation_has_the_same_keys():
    from rlinf.config.evaluation import EvalConfig

    values: dict[str, Any] = {"model": "m", "benchmarks": {"gsm8k": "test.jsonl"}, "max_new_tokens": 64}
    with pytest.raises(ValueError, match="tensor_parallel_size=2: engine=huggingface computes on one device"):
        EvalConfig.model_validate(values | {"tensor_parallel_size": 2})
    with pytest.raises(
        ValueError, match=r"engine_options\.max_totl_tokens: SGLang has no server argument of that name"
    ):
        EvalConfig.model_validate(values | {"engine": "sglang", "engine_options": {"max_totl_tokens": 100}})
    with pytest.raises(ValueError, match=r"engine_options\.max_total_tokens=10 is less than a sequence = 65"):
        EvalConfig.model_validate(values | {"engine": "sglang", "engine_options": {"max_total_tokens": 10}})
    assert EvalConfig.model_validate(values | {"engine": "sglang", "tensor_parallel_size": 2}).devices_per_rank == 2


@pytest.mark.parametrize("size", [1, 2, 4])
def test_an_engine_takes_a_share_of_its_devices_and_cuts_the_model(size: int):
    config = config_of(
        "--rollout.dtype=bfloat16",
        f"--rollout.tensor_parallel_size={size}",
        "--rollout.engine_options={mem_fraction_static: 0.8}",
    )
    job = job_shape(config, device_bytes=H100_BYTES)
    memory = SGLANG_SPEC.memory(MODEL, job)
    assert memory.weights == -(-WEIGHTS // size)
    assert memory.weights + memory.kv_pool == pytest.approx(0.8 * H100_BYTES, rel=1e-6)
    assert kv_tokens(MODEL, job) == pytest.approx((0.8 * H100_BYTES - WEIGHTS / size) / (TOKEN_BYTES / size), abs=1)
    assert memory.sync == 0, "weights are filled in place"
    capped = job_shape(
        config_of("--rollout.engine_options={max_total_tokens: 1000, disable_cuda_graph: true}"),
        device_bytes=H100_BYTES,
    )
    assert SGLANG_SPEC.memory(MODEL, capped).kv_pool == 1000 * 2 * TOKEN_BYTES, "float32, as model.dtype"
    graphs = (2 * 2**20 + 8 * (25 + 8)) * len_of_graphs(capped)
    drawn = job_shape(config_of("--rollout.engine_options={max_total_tokens: 1000}"), device_bytes=H100_BYTES)
    assert SGLANG_SPEC.memory(MODEL, drawn).work() - SGLANG_SPEC.memory(MODEL, capped).work() == graphs > 0


def test_every_device_of_an_engine_carries_its_part():
    config = config_of("--rollout.dtype=bfloat16", "--rollout.tensor_parallel_size=2", "--cluster.num_devices=4")
    loads = loads_of(config, MODEL, plan_of(span=2, num_devices=4), device_bytes=H100_BYTES)
    assert [load.devices for load in loads if load.group == "rollout"] == [(0, 1), (2, 3)]
    assert [load.devices for load in loads if load.group == "actor"] == [(0,), (1,), (2,), (3,)]


def math_problem(*overrides: str):
    data = ["--task.train_files=[a]", "--task.eval_files=[b]", "--cluster.num_devices=64"]
    model = ["--model.path=DeepSeek-R1-Distill-Qwen-7B"]
    return problem_of_recipe(load_config("math-grpo-7b", parse_overrides([*data, *model, *overrides])), gpu="H100")


@pytest.mark.parametrize(
    ("overrides", "says", "needed"),
    [
        (
            ["--rollout.engine_options.mem_fraction_static=0.1"],
            "the KV cache of an engine on 2 devices would hold 13,406 tokens, and the longest sequence has 28,672",
            {"--rollout.engine_options.mem_fraction_static 0.3", "--rollout.tensor_parallel_size 4"},
        ),
        (
            [
                "--rollout.tensor_parallel_size=1",
                "--rollout.dtype=float32",
                "--rollout.engine_options.mem_fraction_static=0.4",
            ],
            "on 1 device would hold 13,406 tokens",
            {"--rollout.tensor_parallel_size 2", "--rollout.dtype bfloat16"},
        ),
        (
            ["--rollout.engine_options.mem_fraction_static=0.99"],
            "does not fit: a device needs about 7",
            {"--rollout.engine_options.mem_fraction_static 0.9"},
        ),
    ],
)
def test_what_does_not_fit_is_refused_with_settings_that_do(overrides: list[str], says: str, needed: set[str]):
    """Each of them is tried as it stands there."""
    with pytest.raises(UserError) as caught:
        math_problem(*overrides)
    assert says in str(caught.value)
    named = {line.partition(":")[0].strip() for line in str(caught.value).splitlines() if line.startswith("  --")}
    assert needed <= named
    for one in named:
        math_problem(*overrides, one.replace(" ", "="))


def test_on_cpu_slots_the_pool_has_room_for_the_steps_sequences():
    shape = replace(MODEL, num_layers=2, hidden_size=64, intermediate_size=128, num_heads=4, head_dim=16, vocab_size=99)
    config = config_of("--rollout.num_prompts=16", "--algorithm.group_size=4")
    job = job_shape(config, on_gpu=False, device_bytes=1 << 30)
    arguments = engine_options(config.rollout, shape, job)
    assert arguments == {"max_total_tokens": 16 * 4 * 25}
    assert SGLANG_SPEC.memory(shape, job).kv_pool == 16 * 4 * 25 * (2 * 2 * 4 * 16 * 4)
    tight = job_shape(config, on_gpu=False, device_bytes=1 << 20)
    assert engine_options(config.rollout, shape, tight)["max_total_tokens"] == (1 << 18) // (2 * 2 * 4 * 16 * 4)
    sized = config_of("--rollout.engine_options={max_total_tokens: 77, attention_backend: torch_native}")
    job = job_shape(sized, on_gpu=False, device_bytes=1 << 30)
    assert engine_options(sized.rollout, shape, job) == sized.rollout.engine_options


def test_no_engine_took_more_than_was_counted():
    """SGLang's own report of its pool, and what its processes held."""
    results = Path(__file__).parents[3] / "benchmarks" / "results" / "sglang-memory.json"
    for name, row in json.loads(results.read_text())["cases"].items():
        assert row["reported_kv_tokens"] == row["counted_kv_tokens"], name
        assert row["measured_bytes"] <= row["counted_bytes"] < 1.4 * row["measured_bytes"], name


def len_of_graphs(job: JobShape) -> int:
    """Rows of the largest graph of an engine that has its own."""
    graphless = replace(job, engine_options={"max_total_tokens": 1000})
    return gpu_sizes(MODEL, graphless)["cuda_graph_max_bs_decode"]


def test_on_a_gpu_an_engine_has_what_the_completions_of_a_step_need():
    flags = ["--rollout.dtype=bfloat16", "--rollout.num_prompts=64", "--algorithm.group_size=8"]
    lengths = ["--rollout.max_new_tokens=256", "--rollout.max_prompt_tokens=128", "--task.num_held_out=8"]
    lengths += ["--model.architecture.max_positions=512"]
    config = config_of(*flags, *lengths, "--cluster.num_devices=1")
    job = job_shape(config, device_bytes=H100_BYTES)
    options = engine_options(config.rollout, MODEL, job)
    assert options == {
        "max_total_tokens": 64 * 8 * (256 + 128),
        "static_bytes": WEIGHTS + 64 * 8 * (256 + 128) * TOKEN_BYTES,
        "context_length": 256 + 128 + 8,
        "max_running_requests": 512,
        "cuda_graph_max_bs_decode": 512,
        "disable_prefill_cuda_graph": True,
    }
    assert SGLANG_SPEC.memory(MODEL, job).state == options["static_bytes"]
    two = job_shape(config_of(*flags, *lengths, "--cluster.num_devices=2"), device_bytes=H100_BYTES)
    assert engine_options(config.rollout, MODEL, two)["max_running_requests"] == 256, "its share of the prompts"
    apart = config_of(*flags, *lengths, "--cluster.num_devices=2", "--mode=disaggregated")
    assert job_shape(apart).engine_sequences == 512, "one engine may be all there is"
    held_out = config_of(*flags, "--task.num_held_out=700", "--cluster.num_devices=1")
    assert job_shape(held_out).engine_sequences == 700


def test_the_users_sizes_win_and_a_pool_never_takes_more_than_its_share_of_the_card():
    flags = ["--rollout.dtype=bfloat16", "--rollout.num_prompts=512", "--rollout.max_new_tokens=20000"]
    flags += ["--model.architecture.max_positions=30000"]
    job = job_shape(config_of(*flags), device_bytes=H100_BYTES)
    share = ON_GPU["mem_fraction_static"]
    assert isinstance(share, float)
    held = engine_options(config_of().rollout, MODEL, job)["static_bytes"]
    assert share * H100_BYTES - TOKEN_BYTES < held <= share * H100_BYTES
    chosen = replace(job, engine_options={"mem_fraction_static": 0.5, "disable_prefill_cuda_graph": False})
    options = engine_options(config_of().rollout, MODEL, chosen)
    assert options.keys() & {"max_total_tokens", "static_bytes"} == set(), "SGLang's own share of what is free"
    assert options["mem_fraction_static"] == 0.5 and options["disable_prefill_cuda_graph"] is False
    assert 1 < options["cuda_graph_max_bs_decode"] < 4096, "as many completions as the pool holds"


def test_a_small_job_stays_on_the_gpu_beside_its_trainer():
    small = replace(MODEL, num_layers=2, vocab_size=1000)
    cluster = Cluster.cuda_nodes(1, 2, name="fake", memory_bytes=H100_BYTES)
    assert ReasoningMemory(config_of("--rollout.dtype=bfloat16"), small, cluster, 0).all_fit_at_once(plan_of())
    filling = config_of("--rollout.dtype=bfloat16", "--rollout.engine_options={mem_fraction_static: 0.9}")
    assert not ReasoningMemory(filling, small, cluster, 0).all_fit_at_once(plan_of())


def recipe_problem(*overrides: str):
    data = ["--task.train_files=[a]", "--task.eval_files=[b]", "--model.path=Qwen2.5-1.5B", "--rollout.engine=sglang"]
    return problem_of_recipe(load_config("gsm8k-grpo-fsdp2", parse_overrides([*data, *overrides])), gpu="H100")


def test_a_derived_profile_is_bounded_by_keys_and_values():
    flags = [
        "--cluster.num_devices=16",
        "--algorithm.kl_coef=0.0",
        "--rollout.num_prompts=4096",
        "--actor.num_shards=16",
    ]
    flags += ["--rollout.max_new_tokens=20000", "--actor.max_tokens_per_micro_batch=32768"]
    by_size = {}
    for size in (1, 2):
        problem = recipe_problem(*flags, f"--rollout.tensor_parallel_size={size}")
        (instance,) = problem.profiles.stages["rollout"].instances
        assert problem.flow.stage("rollout").devices_per_rank == instance.num_devices == size
        by_size[size] = instance
    assert 1 < 2 * by_size[1].max_items < by_size[2].max_items < 4096
    few = (
        recipe_problem(*flags, "--rollout.engine_options={max_running_requests: 16}")
        .profiles.stages["rollout"]
        .instances[0]
    )
    assert few.max_items == 2, "16 completions are two groups of 8"


def test_a_cut_that_heads_do_not_allow_is_refused_by_the_plan():
    with pytest.raises(
        UserError, match="tensor_parallel_size=5 does not divide the model's 12 attention heads; use 1 or 2"
    ):
        recipe_problem("--rollout.tensor_parallel_size=5", "--cluster.num_devices=10")
    with pytest.raises(UserError, match="tensor_parallel_size=4 does not divide the model's 2 KV heads"):
        recipe_problem("--rollout.tensor_parallel_size=4", "--cluster.num_devices=16")


@pytest.mark.parametrize(
    ("recipe", "model", "num_devices", "num_items", "engines"),
    [
        ("gsm8k-grpo-sglang", "Qwen2.5-1.5B", 8, 32, 8),
        ("math-grpo-1.5b", "DeepSeek-R1-Distill-Qwen-1.5B", 64, 512, 64),
        ("math-grpo-1.5b-128k", "DeepSeek-R1-Distill-Qwen-1.5B", 64, 128, 64),
        ("math-grpo-7b", "DeepSeek-R1-Distill-Qwen-7B", 64, 512, 32),
        ("math-grpo-qwen3-30b-a3b", "Qwen3-30B-A3B", 128, 1536, 32),
        ("search-r1-ppo", "Qwen2.5-7B", 8, 512, 8),
        ("search-r1-grpo", "Qwen2.5-3B", 8, 512, 8),
        ("retool-grpo", "Qwen2.5-32B", 32, 512, 8),
        ("mini-swe-grpo", "Qwen3-8B", 8, 16, 4),
    ],
)
def test_a_recipe_plans_for_its_cluster(
    capsys, recipe: str, model: str, num_devices: int, num_items: int, engines: int
):
    arguments = ["--model.path", model, "--cluster.num_devices", str(num_devices), "--mode", "collocated", "--json"]
    assert main(["plan", recipe, *arguments]) == 0
    explanation = json.loads(capsys.readouterr().out)
    rollout = next(stage for stage in explanation["plan"]["stages"] if stage["stage"] == "rollout")
    assert (len(rollout["devices"]), rollout["num_ranks"]) == (num_devices, engines)
    assert f" takes {num_items:,} items " in explanation["sentences"][0]
    assert max(one["peak_bytes"] for one in explanation["plan"]["prediction"]["stages"].values()) < H100_BYTES


PACKED = "--actor.max_tokens_per_micro_batch=8192"


def test_training_is_timed_in_the_numbers_that_it_computes_in():
    problems = [
        recipe_problem("--cluster.num_devices=8", PACKED, f"--actor.backend_options={{compute_dtype: {dtype}}}")
        for dtype in ("float32", "bfloat16")
    ]
    flags = ["--task.train_files=[a]", "--task.eval_files=[b]", "--model.path=Qwen2.5-1.5B", "--actor.num_shards=8"]
    config = load_config("gsm8k-grpo-fsdp2", parse_overrides([*flags, PACKED]))
    assert isinstance(config, ReasoningConfig)
    # eight ranks with a pass of four groups each, and backward twice that
    launched_s = 8 * 3 * launch_s(find_model("Qwen2.5-1.5B"), job_shape(config))
    times = [problem.profiles.stages["actor"].instances[0].seconds(32) - launched_s for problem in problems]
    assert times[0] / times[1] == pytest.approx(DENSE_UTILISATION / (FLOAT32_UTILISATION * FLOAT32_RATE))


def interpreter(**packages: str) -> Interpreter:
    return Interpreter(path="/envs/there/bin/python", python="3.11.9", packages=packages, folders={})


def test_an_environment_without_the_engine_is_refused_with_what_to_type(monkeypatch):
    settings = config_of().rollout
    monkeypatch.setattr(generation, "_version_here", lambda package: None)
    with pytest.raises(UserError, match="sglang is not installed in the environment of") as caught:
        generation.check_installed(settings, None)
    assert "rlinf venv create sglang" in str(caught.value) and "--venvs.rollout sglang" in str(caught.value)
    with pytest.raises(UserError, match="not installed in the environment of /envs/there/bin/python") as caught:
        generation.check_installed(settings, interpreter(torch="2.13.0"))
    assert "rlinf venv list" in str(caught.value) and "--venvs.rollout" not in str(caught.value)
    generation.check_installed(settings, interpreter(sglang=SGLANG_SPEC.known_versions[0]))
    with pytest.raises(UserError, match=r"has sglang 0\.1\.0; known to work: 0"):
        generation.check_installed(settings, interpreter(sglang="0.1.0"))
    generation.check_installed(
        config_of("--rollout.engine_options.any_version=true").rollout, interpreter(sglang="0.1.0")
    )
    generation.check_installed(config_of("--rollout.engine=huggingface").rollout, None)


def test_train_and_eval_ask_before_anything_starts(refused, gsm8k_inputs, monkeypatch):
    monkeypatch.setattr(generation, "_version_here", lambda package: None)
    assert refused("train", "sort-grpo", *SGLANG).startswith("rollout.engine=sglang: sglang is not installed in the")
    flags = ["--model", "model", "--engine", "sglang", "--max_new_tokens", "8"]
    assert refused("eval", "gsm8k=test.jsonl", *flags).startswith("engine=sglang: sglang is not installed in the")
