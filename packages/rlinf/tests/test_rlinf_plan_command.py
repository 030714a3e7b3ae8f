"""`rlinf plan`: what it takes, prints and writes, and how each mistake ends."""

import inspect
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rlinf.cli.main import main
from rlinf.config.embodied import EmbodiedConfig
from rlinf.config.load import load_config
from rlinf.config.overrides import parse_overrides
from rlinf.jobs.base import Flows
from rlinf.jobs.embodied.flow import training_flow as embodied_flow
from rlinf.jobs.reasoning.flow import training_flow as reasoning_flow
from rlinf.planning.memory import Load, MemoryPool, device_place
from rlinf.planning.plans import plans_of_problem
from rlinf.planning.problems import problem_of_recipe
from rlinf_sched import Plan, problem_json_schema
from rlinf_sched.derive import MEMORY_KINDS, RankMemory, find_model

pytestmark = pytest.mark.usefixtures("brief_search")

EXAMPLES = Path(__file__).parents[2] / "rlinf-sched" / "examples"
LAPTOP = str(EXAMPLES / "laptop.json")
RECIPE = ["gsm8k-grpo", "--model.path", "Qwen2.5-1.5B", "--cluster.num_devices", "16"]
DEVICES = ["--cluster.num_devices", "8"]
ROBOT = ["maniskill-openvla-ppo", "--policy.options.folder", "OpenVLA-7B", *DEVICES]
LARGE = ["gsm8k-grpo", "--model.path", "Qwen2.5-7B", "--cluster.num_devices", "8"]


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Runs `rlinf plan` in an empty folder."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: str) -> SimpleNamespace:
        capsys.readouterr()
        code = main(["plan", *arguments])
        out, err = capsys.readouterr()
        return SimpleNamespace(code=code, out=out, err=err)

    return run


def test_a_problem_file_is_planned_and_told(plan, tmp_path: Path):
    outcome = plan(LAPTOP)
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    assert lines[0].startswith("One step of laptop takes 16 items through 2 stages in ")
    assert [line for line in lines if line in ("plan", "critical path", "modes", "what if")] == [
        *("plan", "critical path", "modes"),
    ]
    assert outcome.out.endswith("for the page with the timeline, add --output FOLDER\n")
    assert list(tmp_path.iterdir()) == []


def test_files_are_written_where_asked_and_agree(plan, tmp_path: Path):
    outcome = plan(LAPTOP, "--output", "new/folder", "--what-if")
    assert outcome.out.splitlines()[-1] == "page: new/folder/plan.html"
    folder = tmp_path / "new" / "folder"
    assert sorted(path.name for path in folder.iterdir()) == [
        "explanation.json",
        "plan.html",
        "plan.json",
        "trace.json",
    ]
    explanation = json.loads((folder / "explanation.json").read_text())
    written = Plan.from_json((folder / "plan.json").read_text())
    assert Plan.from_json(json.dumps(explanation["plan"])) == written
    assert "what if\n" in outcome.out and len(explanation["what_if"]) == 8
    events = json.loads((folder / "trace.json").read_text())["traceEvents"]
    assert {event["name"] for event in events if event["ph"] == "X"} >= {"rollout", "actor"}
    assert "What if" in (folder / "plan.html").read_text()


def test_draws_judge_plans_by_drawn_costs(plan):
    explanation = json.loads(plan(LAPTOP, "--json", "--draws", "3").out)
    assert explanation["plan"]["prediction"]["num_draws"] == 3 and "3 steps with drawn costs" in explanation["notes"][0]
    outcome = plan(LAPTOP, "--draws", "-1")
    assert outcome.code != 0 and "num_draws=-1" in outcome.err


def test_json_is_the_explanation_and_nothing_else(plan):
    explanation = json.loads(plan(LAPTOP, "--json").out)
    assert explanation["step_s"] > 0 and explanation["plan"]["flow"] == "laptop" and explanation["what_if"] == []


@pytest.mark.parametrize("mode", ["collocated", "disaggregated"])
def test_a_mode_can_be_asked_for(plan, mode: str):
    explanation = json.loads(plan(LAPTOP, "--mode", mode, "--json").out)
    assert explanation["plan"]["mode"] == mode
    assert {row["mode"] for row in explanation["modes"]} == {mode}


def test_the_schema_needs_no_problem(plan):
    assert json.loads(plan("--schema").out) == problem_json_schema()


def test_a_recipe_is_planned_for_gpus_that_are_not_there(plan):
    explanation = json.loads(plan(*RECIPE, "--gpu", "H200", "--json").out)
    assert explanation["plan"]["flow"] == "grpo"
    assert {stage["stage"] for stage in explanation["plan"]["stages"]} == {"rollout", "reference", "reward", "actor"}
    assert "16 x NVIDIA H200" in explanation["sentences"][0]


ON_ONE = ["--model.path", "Qwen2.5-1.5B", "--cluster.num_devices", "1"]


def test_what_cuda_takes_of_a_gpu_is_no_room_for_state(plan, monkeypatch: pytest.MonkeyPatch):
    def offloading() -> set[str]:
        stages = json.loads(plan("gsm8k-grpo", *ON_ONE, "--gpu", "H200", "--json").out)["plan"]["stages"]
        return {stage["stage"] for stage in stages if stage["offload"]}

    assert not offloading()
    monkeypatch.setattr("rlinf.planning.memory.CONTEXT_BYTES", 18 << 30)
    assert offloading()


def test_mode_auto_plans_beside_cuda_too():
    overrides = parse_overrides([*ON_ONE, "--task.train_files", "[a]", "--task.eval_files", "[b]"])
    problem = problem_of_recipe(load_config("gsm8k-grpo", overrides), gpu="H200")
    (device,) = problem.cluster.devices
    load = Load(group="actor", memory=RankMemory(weights=0), num_items=1, offload=False, num_contexts=50)

    def fullest_place(plan: Plan) -> MemoryPool:
        is_full = not any(stage.offload for stage in plan.stages)
        place = device_place(device.name, device.memory_bytes, [load])
        return replace(place, needed_bytes=device.memory_bytes + is_full)

    train = SimpleNamespace(name=problem.flow.name, graph=lambda: problem.flow)
    flows: Any = Flows(train=train, evaluate=train)  # pyright: ignore[reportArgumentType]
    memory = SimpleNamespace(fullest_place=fullest_place, check=lambda plan: None)
    for job, offloads in ((SimpleNamespace(memory=None), False), (SimpleNamespace(memory=memory), True)):
        placed = plans_of_problem(job, flows, problem).plans[problem.flow.name]  # pyright: ignore[reportArgumentType]
        assert any(stage.offload for stage in placed.stages) == offloads


def test_what_a_rank_needs_is_told_by_kind(plan, tmp_path: Path):
    """On the terminal and on the page; the kinds of a pass add up to the peak."""
    out = plan(*RECIPE, "--output", "page").out
    header, *rows = out.partition("memory of a rank, GiB\n")[2].partition("\n\n")[0].splitlines()
    kinds = [kind for kind in MEMORY_KINDS if kind in header]
    assert {"weights", "gradients", "optimizer", "activations", "KV cache"} < set(kinds)
    assert [row.split()[0] for row in rows] == ["rollout", "reference", "actor"]
    actor = [float(number) for number in rows[-1].split()[1:]]
    assert actor[0] == round(4 * find_model("Qwen2.5-1.5B").num_parameters / 2**30, 2)
    assert sum(actor[:4]) == pytest.approx(actor[-1], abs=0.03)
    page = (tmp_path / "page" / "plan.html").read_text()
    assert "Memory of a rank by kind, GiB" in page
    assert all(f"{number:.2f}" in page for number in actor)
    assert "memory of a rank" not in plan(LAPTOP).out


def test_the_problem_of_a_recipe_has_its_numbers():
    overrides = parse_overrides([*RECIPE[1:], "--task.train_files", "[a]", "--task.eval_files", "[b]"])
    problem = problem_of_recipe(load_config("gsm8k-grpo", [*overrides, *parse_overrides(["--algorithm.kl_coef", "0"])]))
    problem.validate()
    assert (problem.num_items, problem.cluster.num_devices) == (32, 16)
    assert [stage.name for stage in problem.flow.stages] == ["rollout", "reward", "actor"]


def test_a_recipe_is_planned_as_train_runs_it():
    """A whole model in float32 on every rank, no engine over several GPUs, one rank a gradient shard."""
    overrides = parse_overrides([*RECIPE[1:], "--task.train_files", "[a]", "--task.eval_files", "[b]"])
    problem = problem_of_recipe(load_config("gsm8k-grpo", overrides))
    instances = {name: profile.instances for name, profile in problem.profiles.stages.items() if name != "reward"}
    assert {one.num_devices for of_stage in instances.values() for one in of_stage} == {1}
    weights = 4 * find_model("Qwen2.5-1.5B").num_parameters
    assert [one.state_bytes for one in instances["rollout"]] == [weights]
    assert {one.num_ranks: one.state_bytes // weights for one in instances["actor"]} == {
        1: 19,
        2: 11,
        4: 7,
        8: 5,
        16: 4,
    }
    assert not any(one.sharded_state_bytes for of_stage in instances.values() for one in of_stage)


MEGATRON = ["qwen3-moe-grpo-megatron", "--model.path", "Qwen3-30B-A3B", "--cluster.num_devices", "64"]


def test_a_sync_takes_the_measured_rate_of_the_weight_sync_that_the_run_has():
    flags = ["--model.path=Qwen/Qwen2.5-7B", "--actor.backend=fsdp2", "--model.dtype=bfloat16"]
    flags += ["--task.train_files", "[a]", "--task.eval_files", "[b]"]

    def sync_s(*more: str) -> float:
        problem = problem_of_recipe(load_config("gsm8k-grpo", parse_overrides([*flags, *more])))
        return problem.sync_latency_s(problem.flow.weight_edges[0])

    assert sync_s("--cluster.num_devices=8") == pytest.approx(15.2e9 / 42e9, rel=0.01)
    assert sync_s("--cluster.num_devices=16") == pytest.approx(15.2e9 / 9.4e9, rel=0.01)  # two machines
    assert sync_s("--cluster.num_devices=8", "--cluster.weight_sync=streams") > 1.5


def test_replicas_of_megatron_are_planned_with_all_their_devices(plan):
    explanation = json.loads(plan(*MEGATRON, "--gpu", "H200", "--mode", "collocated", "--json").out)
    (actor,) = (stage for stage in explanation["plan"]["stages"] if stage["stage"] == "actor")
    assert (len(actor["devices"]), actor["num_ranks"]) == (64, 4)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--actor.backend_options.tensor_parallel", "8"], "tensor_parallel=8 does not divide the model's 4 KV groups"),
        (["--actor.backend_options.pipeline_parallel", "49"], "the model has 48 layers; use at most 48"),
        (
            ["--actor.backend_options.expert_parallel", "12", "--actor.backend_options.context_parallel", "3"],
            "does not divide the model's 128 experts",
        ),
        (["--actor.backend_options.sequence_parallel", "false"], "needs sequence_parallel: true"),
        (["--cluster.num_devices", "40"], "=40 is not a multiple of the 16 ranks that hold one copy of the model"),
    ],
)
def test_a_plan_promises_no_cut_that_cannot_be(plan, arguments, says):
    outcome = plan(*MEGATRON, *arguments, "--gpu", "H200")
    assert outcome.code != 0 and says in " ".join(outcome.err.split())


def test_a_refusal_of_megatron_tries_its_own_options(plan):
    more = ["--actor.max_tokens_per_micro_batch", "655360"]
    outcome = plan(*MEGATRON, "--actor.backend_options.recompute", "false", *more, "--gpu", "H200")
    assert "--actor.backend_options.recompute true: " in outcome.err


def test_flows_are_declared_without_torch_and_lead_to_workers():
    for recipe, overrides, flow in (
        ("add-grpo", ["--algorithm.kl_coef=0.1"], lambda config: reasoning_flow(config)),
        ("pushcube-ppo", [], lambda config: embodied_flow(config, on_host=True)),
    ):
        declared = flow(load_config(recipe, parse_overrides(overrides)))
        declared.check()
        (on_host,) = (stage.name for stage in declared.graph().stages if not stage.needs_device)
        assert on_host == ("reward" if recipe == "add-grpo" else "env")
    code = "import sys, rlinf.jobs.reasoning.flow, rlinf.jobs.embodied.flow; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_robots_recipe_takes_what_the_published_workload_takes(plan):
    """Both are the paper's 256 environments and 80 steps; the recipe's come in groups of four, and each group has one
    instance of the policy, where the published workload's instances take what lies ready. The published workload's sync
    is that of public systems."""
    recipe = json.loads(plan(*ROBOT, "--json").out)
    published = json.loads(plan("maniskill-openvla-8", "--json").out)
    assert (recipe["plan"]["mode"], published["plan"]["mode"]) == ("collocated", "hybrid")
    collocated = next(row["step_s"] for row in published["modes"] if row["mode"] == "collocated")
    faster_s = find_model("OpenVLA-7B").weights_bytes * (1 / 9.4e9 - 1 / 42e9)
    assert recipe["step_s"] == pytest.approx(collocated - faster_s, rel=1e-6)


def test_a_robots_steps_that_overlap_are_predicted_from_end_to_end(plan):
    outcomes = [
        json.loads(plan(*ROBOT, "--mode", "disaggregated", "--algorithm.max_staleness", str(k), "--json").out)
        for k in (0, 1)
    ]
    predictions = [outcome["plan"]["prediction"] for outcome in outcomes]
    assert [prediction["max_staleness"] for prediction in predictions] == [0, 1]
    assert predictions[1]["step_s"] < 0.8 * predictions[0]["step_s"]
    notices = [[text for text in outcome["sentences"] if "versions of the weights" in text] for outcome in outcomes]
    assert notices[0] == [] and notices[1][0].startswith("actor keeps 2 versions of the weights")


def test_a_step_with_late_groups_costs_what_its_mean_group_costs(plan):
    """In order it costs what its longest completion costs."""
    keys = [*RECIPE, "--mode", "disaggregated", "--algorithm.max_staleness", "2"]
    late = ["--rollout.sampler", "as_finished", "--rollout.engine_options", "{refill: true}"]
    in_order = ["--rollout.engine_options", "{refill: true}"]
    steps = [json.loads(plan(*keys, *more, "--json").out)["plan"]["prediction"]["step_s"] for more in (late, in_order)]
    assert steps[0] < steps[1]


def test_what_a_recipe_leaves_out_is_planned_as_the_policies_have_it():
    from rlinf_workers.plugins import POLICIES
    from rlinf_workers.policies import ActingCost
    from rlinf_workers.policies.openvla_oft.options import OftOptions
    from rlinf_workers.policies.pi0.options import Pi0Options
    from rlinf_workers.policies.pi05.options import Pi05Options
    from rlinf_workers.policies.smolvla.options import SmolVLAOptions

    def cost_of(name: str) -> ActingCost:
        cost = POLICIES.spec(name).acting_cost({"folder": "unread"}, {})
        assert cost is not None
        return cost

    assert cost_of("openvla_oft").chunk_size == OftOptions().chunk_size
    for name, options in (("pi0", Pi0Options()), ("pi05", Pi05Options()), ("smolvla", SmolVLAOptions())):
        cost = cost_of(name)
        assert (cost.chunk_size, cost.denoising_steps) == (options.chunk_size, options.num_denoising_steps)


def test_pictures_are_planned_as_the_simulator_draws_them():
    """640 x 480 of the bridge scenes; 256 environments, 80 steps."""
    config = load_config("maniskill-openvla-ppo", parse_overrides([*ROBOT[1:3], *DEVICES]))
    assert isinstance(config, EmbodiedConfig)
    trajectories = problem_of_recipe(config).flow.item_bytes["trajectories"] * config.env.num_groups
    pictures = 256 * 80 * 640 * 480 * 3
    assert pictures < trajectories < 1.001 * pictures
    config.env.options["image_size"] = 100
    assert problem_of_recipe(config).flow.item_bytes["observations"] == 4 * 100 * 100 * 3


def test_pictures_without_a_size_have_the_environments():
    from rlinf_envs import kind_spec
    from rlinf_envs.adapters.libero.env import LiberoOptions
    from rlinf_envs.adapters.metaworld.env import MetaworldEnv

    size = inspect.signature(MetaworldEnv.__init__).parameters["image_size"].default
    assert kind_spec("metaworld").picture_pixels({}) == size**2
    assert kind_spec("libero").picture_pixels({}) == LiberoOptions().image_size ** 2


def test_another_task_on_a_gpu_is_told_whose_cost_it_is_planned_with(plan):
    explanation = json.loads(plan(*ROBOT, "--env.id", "PickCube-v1", "--json").out)
    assert any(
        note.startswith("env.id=PickCube-v1 is planned with what ManiSkill Put") for note in explanation["notes"]
    )
    for others in ([], ["--env.id", "PickCube-v1", "--env-step-s", "0.1"]):
        notes = json.loads(plan(*ROBOT, *others, "--json").out)["notes"]
        assert not any("is planned with" in note for note in notes)


def test_simulators_take_the_hosts_cores_and_the_time_that_is_given(plan):
    """Eight GPUs have 112 cores, of which the groups leave 64."""
    recipe, cost, ranks = "libero-oft-grpo", "0.5", 64
    arguments = [recipe, "--policy.options.folder", "unread", *DEVICES, "--mode", "collocated", "--json"]
    baseline, slower = (json.loads(plan(*arguments, *more).out) for more in ([], ["--env-step-s", cost]))
    env, policy, actor = baseline["plan"]["stages"]
    assert (env["num_ranks"], env["devices"]) == (ranks, [])
    assert len(policy["devices"]) == len(actor["devices"]) == 8
    config = load_config(recipe)
    assert isinstance(config, EmbodiedConfig)
    simulated = (config.env.episodes_per_step or 0) // ranks * config.env.num_steps * float(cost)
    assert slower["step_s"] > simulated > baseline["step_s"]


def test_simulators_have_the_cores_of_the_drivers_node_however_many_nodes_there_are():
    def env(num_devices: int):
        overrides = ["--policy.options.folder=unread", f"--cluster.num_devices={num_devices}"]
        return problem_of_recipe(load_config("libero-oft-grpo", parse_overrides(overrides))).profile("env")

    assert env(32) == env(8)
    assert (env(4).max_instances, env(8).max_instances) == (56, 112)


def test_whole_episodes_take_the_memory_of_their_simulators_and_the_rounds_of_all_episodes():
    def env(*overrides: str):
        recipe, *others = [*ROBOT, *overrides]
        return problem_of_recipe(load_config(recipe, parse_overrides(others))).profile("env")

    steps = ("--env.num_steps=80", "--env.max_episode_steps=80")
    few = (*steps, "--env.num_envs=64", "--env.num_groups=8", "--env.episodes_per_step=256")
    at_once, in_turn = env(*steps), env(*few)
    assert (at_once.rounds, in_turn.rounds) == (80, 4 * 80)
    assert in_turn.instances[0].sharded_state_bytes == at_once.instances[0].sharded_state_bytes / 4 > 0


def test_a_policy_that_acts_in_two_steps_at_once_holds_two_versions_of_the_weights():
    few = ("--env.num_steps=80", "--env.max_episode_steps=80", "--env.num_envs=64", "--env.num_groups=8")
    whole = (*few, "--env.episodes_per_step=256", "--algorithm.max_staleness=1", "--mode=disaggregated")

    def state_bytes(*overrides: str) -> int:
        recipe, *others = [*ROBOT, *whole, *overrides]
        return (
            problem_of_recipe(load_config(recipe, parse_overrides(others))).profile("policy").instances[0].state_bytes
        )

    assert state_bytes("--env.num_processes=1") == pytest.approx(2 * state_bytes(), rel=0.05)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ([], "give a problem file or a recipe\nhint: see rlinf plan --help"),
        (
            ["gsm8k-grop"],
            "'gsm8k-grop' is no problem file, workload or recipe; did you mean gsm8k-grpo?\nhint: workloads",
        ),
        (["absent.json"], "absent.json: No such file or directory"),
        (["absent.yaml"], "absent.yaml: No such file or directory"),
        ([LAPTOP, "--mode", "fast"], "argument --mode: invalid choice: 'fast'"),
        ([LAPTOP, "--num_items", "3"], "--num_items: only a recipe takes overrides"),
        (["sort-grpo", "--rollout.engine", "tgi"], "rollout.engine=tgi: no generation engine is called 'tgi'"),
        (["sort-grpo", "--actor.backend", "fsdp"], "actor.backend=fsdp: no training backend is called 'fsdp'"),
        (["pushcube-ppo", "--cluster.launcher", "slurm"], "cluster.launcher: no launcher is called 'slurm'"),
        ([*RECIPE, "--reference.path", "absent"], "reference.path: model='absent' is neither the folder of"),
        (["pushcube-ppo"], "cluster.num_devices=auto: a plan is made for a number of GPUs"),
        (["pushcube-ppo", *DEVICES], "policy.name=actor_critic: what it takes is not known before it is profiled"),
        ([*ROBOT, "--policy.options.folder", "null"], "policy.options.folder is not set: times are derived from"),
        (
            [*ROBOT, "--env.options.sim_backend", "cpu"],
            "env.kind=maniskill: there are no public figures of this simulator",
        ),
        ([*ROBOT, "--actor.backend", "replicated"], "actor needs"),
        ([*RECIPE, "--env-step-s", "0.1"], "--env-step-s: this recipe has no environments"),
        ([LAPTOP, "--env-step-s", "0.1"], f"--env-step-s 0.1: {LAPTOP} says itself what its stages take"),
        (["gsm8k-grpo"], "gsm8k-grpo.yaml:26: model.path is not set; give --model.path FOLDER"),
        (RECIPE[:3], "cluster.num_devices=auto: a plan is made for a number of GPUs"),
        (
            [*RECIPE, "--model.path", "Qwen2.5-8B"],
            "model.path: model='Qwen2.5-8B' is neither the folder of a model nor a public model whose shape is known; "
            "did you mean 'Qwen2.5-",
        ),
        ([*RECIPE, "--gpu", "H10"], "gpu='H10'; did you mean 'H100'?"),
        (LARGE, "model.path: Qwen2.5-7B, 7.62 billion parameters, does not fit: a device needs about"),
        (["sort-grpo", *DEVICES], "model.path is not set: times are derived from the shape of a model"),
    ],
)
def test_a_mistake_is_told(plan, arguments: list[str], expected: str):
    outcome = plan(*arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"error: {expected}")


def test_a_mistake_in_a_problem_file_names_file_and_key(plan, tmp_path: Path):
    text = (EXAMPLES / "laptop.json").read_text()
    (tmp_path / "mine.yaml").write_text(text.replace('"trains"', '"train"'))  # JSON is YAML, too
    assert plan("mine.yaml").err == (
        "error: mine.yaml: problem.flow.stages[1].train is not a known key; did you mean 'trains'?\n"
    )
    (tmp_path / "mine.json").write_text(text.replace('"num_items": 16', '"num_items": -16'))
    assert plan("mine.json").err == "error: mine.json: num_items=-16 must be from 1 to 10,000,000\n"


def test_an_output_that_cannot_be_a_folder_is_refused(plan, tmp_path: Path):
    (tmp_path / "file").write_text("")
    assert plan(LAPTOP, "--output", "file").err == (
        "error: --output=file is a file; a folder is written\nhint: choose another name with --output\n"
    )


def test_planning_imports_no_torch(tmp_path: Path):
    program = (
        "import sys; from rlinf.cli.main import main\n"
        f"for arguments in ({[LAPTOP, '--output', 'out']}, {[*RECIPE]}):\n"
        "    assert main(['plan', *arguments]) == 0 and 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
