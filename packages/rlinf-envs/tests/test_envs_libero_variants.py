"""Variants of LIBERO-Plus and suites of LIBERO-PRO: names, cameras, postures, pictures, and packages on the disk."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.spatial.transform import Rotation
from test_envs_libero import FakeScene, libero, write_assets, write_package

from rlinf_envs import EnvError, kind_spec
from rlinf_envs.adapters.libero import env as libero_env, scene, tasks
from rlinf_envs.adapters.libero.camera_views import moved
from rlinf_envs.adapters.libero.picture_noise import NOISE_SIZE, degraded
from rlinf_envs.adapters.libero.tasks import limit_of, tasks_of
from rlinf_envs.adapters.libero.variants import CameraView, LiberoVariation, arm_posture, variation_of

BOWL = "pick_up_the_black_bowl_from_table_center_and_place_it_on_the_plate"
STILL = "view_0_0_100_0_0_initstate_0"


@pytest.mark.parametrize(
    ("name", "variation"),
    [
        (
            f"{BOWL}_view_11_15_119_4_350_initstate_0",
            ("camera", CameraView(around=11, up=15, distance=119, turn=4, tilt=350)),
        ),
        (f"{BOWL}_view_0_0_100_0_0_initstate_312", ("robot", 312)),
        (f"{BOWL}_{STILL}_noise_42", ("noise", 42)),
        (f"{BOWL}_language_7_{STILL}", ("language", 7)),
        (f"{BOWL}_light_3", ("light", None)),
        (f"{BOWL}_table_12", ("background", None)),
        (f"{BOWL}_tb_1", ("background", None)),
        (f"{BOWL}_add_16", ("layout", None)),
        (f"{BOWL}_level2_sample4", ("layout", None)),
    ],
)
def test_a_name_says_what_a_variant_changes(name, variation):
    category, value = variation
    parsed = variation_of(name)
    assert (parsed.category, parsed.task) == (category, BOWL)
    changes = {"camera": parsed.view, "robot": parsed.arm, "noise": parsed.noise, "language": parsed.sentence}
    assert changes.pop(category, None) == value
    assert all(change in (0, CameraView()) for change in changes.values())


def test_other_names_are_refused():
    with pytest.raises(EnvError, match="'put_the_bowl_on_the_plate' is no variant of LIBERO-Plus"):
        variation_of("put_the_bowl_on_the_plate")


POSITION, WXYZ = np.array([0.6586, 0.0, 1.6103]), np.array([0.6380, 0.3048, 0.3048, 0.6380])


@pytest.mark.parametrize(
    "view",
    [
        CameraView(around=30),
        CameraView(up=15, around=11),
        CameraView(distance=80),
        CameraView(turn=10, tilt=350),
        CameraView(up=10, around=345, distance=120, turn=4, tilt=6),
    ],
)
def test_cameras_move_as_scipys_rotations(view):
    middle = np.array([0.0, 0.0, 0.8])
    up, around = Rotation.from_euler("y", -view.up, degrees=True), Rotation.from_euler("z", view.around, degrees=True)
    place = middle + view.distance / 100 * (around * up).apply(POSITION - middle)
    own = Rotation.from_euler("y", -view.tilt, degrees=True) * Rotation.from_euler("z", view.turn, degrees=True)
    turn = own * around * up * Rotation.from_quat(WXYZ[[1, 2, 3, 0]])
    position, wxyz = moved(POSITION, WXYZ, view)
    assert position == pytest.approx(place, abs=3e-4)  # four decimals after every turn
    assert (Rotation.from_quat(wxyz[[1, 2, 3, 0]]) * turn.inv()).magnitude() < 1e-3
    assert np.array_equal(position, np.round(position, 4)) and np.array_equal(wxyz, np.round(wxyz, 4))


def test_postures_are_those_of_the_package():
    """The first, the 101st and the last, copied from the numbers in its robots."""
    first = [0.02097405, -0.16687568, 0.02734903, -2.38028663, -0.00988726, 2.21686563, 0.85208136]
    assert arm_posture(1) == pytest.approx(first, abs=1e-12)
    own = arm_posture(0)
    assert [round(float(np.linalg.norm(arm_posture(k) - own)), 6) for k in (100, 101, 500)] == [0.1, 0.2, 0.5]
    with pytest.raises(EnvError, match="no arm posture 501"):
        arm_posture(501)


@pytest.mark.parametrize("number", [1, 11, 21, 31, 41])
def test_pictures_get_worse_with_the_strength_and_depend_on_the_generator_alone(number):
    rows, columns = np.mgrid[:NOISE_SIZE, :NOISE_SIZE]
    picture = np.repeat((((rows // 16 + columns // 16) % 2) * 200 + 20)[..., None], 3, -1).astype(np.uint8)
    weak, strong = (degraded(picture, n, np.random.default_rng(3)) for n in (number, number + 9))
    assert weak.dtype == np.uint8 and weak.shape == picture.shape
    errors = [float(np.abs(one.astype(float) - picture).mean()) for one in (weak, strong)]
    assert 0.2 < errors[0] < errors[1]
    assert np.array_equal(weak, degraded(picture, number, np.random.default_rng(3)))


def plus_names() -> list[str]:
    return [
        f"{BOWL}_view_0_0_100_2_352_initstate_0",
        f"{BOWL}_{STILL}_noise_12",
        f"{BOWL}_view_0_0_100_0_0_initstate_3",
        f"{BOWL}_language_1_{STILL}",
        f"{BOWL}_level0_sample1",
        f"{BOWL}_light_1",
        f"{BOWL}_add_2",
    ]


GOAL = "(define (problem {problem})\n (:language {words})\n (:objects\n  bowl_1 - bowl\n{more} )\n)\n"
PROBLEMS = """
class Table(Base):
    pass
class Table_light_1(Table):
    scene = {"scene_xml": "scenes/lights/light_1.xml"}
"""


@pytest.fixture
def simulated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[LiberoVariation | None]:
    """Packages of LIBERO and LIBERO-Plus, and scenes, are stand-ins; returns the variations that scenes took."""
    root = write_package(tmp_path / "site")
    plus = tmp_path / "site" / "liberoplus" / "liberoplus"
    for folder in ("bddl_files/libero_spatial", "init_files/libero_spatial", "envs/problems", "benchmark"):
        (plus / folder).mkdir(parents=True)
    (plus / "init_files" / "libero_newobj" / "libero_spatial").mkdir(parents=True)
    tasks_by_suite = {"libero_spatial": plus_names()}
    (plus / "benchmark" / "libero_suite_task_map.py").write_text(f"libero_task_map = {json.dumps(tasks_by_suite)}")
    (plus / "envs" / "problems" / "table.py").write_text(PROBLEMS)
    goals = {
        "": ("Table", "own words", ""),
        "_language_1": ("Table", "other words", ""),
        "_level0_sample1": ("Table", "", ""),
    }
    goals |= {"_light_1": ("Table_light_1", "", ""), "_add_2": ("Table", "", "  tin_1 - tin\n")}
    for end, (problem, words, more) in goals.items():
        text = GOAL.format(problem=problem, words=words, more=more)
        (plus / "bddl_files" / "libero_spatial" / f"{BOWL}{end}.bddl").write_text(text)
    torch.save(np.arange(50.0)[:, None], plus / "init_files" / "libero_spatial" / f"{BOWL}.pruned_init")
    own = plus / "init_files" / "libero_newobj" / "libero_spatial" / f"{BOWL}_level0_sample1.pruned_init"
    torch.save(np.array([77.0]), own)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setattr(tasks, "package", lambda: root)
    monkeypatch.setattr(libero_env, "assets_folder", lambda assets: write_assets(tmp_path / "assets"))
    taken: list[LiberoVariation | None] = []

    class VariedScene(FakeScene):
        def vary(self, variation: LiberoVariation | None) -> None:
            taken.append(variation)

    monkeypatch.setattr(libero_env, "LiberoScene", VariedScene)
    return taken


IN_SCENES = ["camera", "robot", "language", "noise"]


def test_seeds_that_count_up_traverse_the_task_list_once_in_its_order(simulated):
    env = libero("libero_plus_spatial", 4, categories=IN_SCENES, steps=1)
    observation = env.reset([0, 1, 2, 3])
    assert [end.task for end in env.step(torch.zeros(4, 7)).episodes] == plus_names()[:4]
    assert observation["state"][:, 0].tolist() == [0.0] * 4  # the first shipped state, in all
    assert observation["instruction"][3] == "other words"
    assert [variation.category for variation in simulated[:4]] == ["camera", "noise", "robot", "language"]
    assert limit_of("libero_plus_spatial") == 220
    env.close()


def test_a_layout_of_known_objects_has_its_own_goal_and_start(simulated):
    (task,) = tasks_of("libero_plus_spatial", [f"{BOWL}_level0_sample1"])
    assert task.goal_file.name == f"{BOWL}_level0_sample1.bddl" and task.built_as.name == task.name
    env = libero("libero_plus_spatial", 1, tasks=[task.name], steps=1)
    assert env.reset([5])["state"][0, 0] == 77.0
    env.close()


def test_what_needs_other_files_is_refused_with_the_first_of_them(simulated):
    with pytest.raises(EnvError, match=r"2 of 7 variants need files .*_light_1, needs scenes/lights/light_1\.xml of"):
        libero("libero_plus_spatial")
    with pytest.raises(EnvError, match=r"1 of 2 variants need files .*_add_2, needs new_objects/tin of"):
        libero("libero_plus_spatial", categories=["layout"])
    with pytest.raises(EnvError, match=r"options\.categories: there is no 'sound'; there are camera, robot"):
        libero("libero_plus_spatial", categories=["sound"])
    with pytest.raises(EnvError, match=r"options\.categories is for LIBERO-Plus"):
        libero("libero_spatial", categories=["noise"])
    with pytest.raises(EnvError, match=r"options\.image_size=128: LIBERO-Plus degrades pictures of 256 pixels"):
        libero("libero_plus_spatial", categories=["noise"], cameras=["agentview"], image_size=128)


def test_pro_suites_are_tasks_of_libero_with_other_files(simulated, tmp_path):
    pro = tmp_path / "site" / "liberopro" / "liberopro"
    for change in ("swap", "task"):
        for folder in (f"bddl_files/libero_goal_{change}", f"init_files/libero_goal_{change}"):
            (pro / folder).mkdir(parents=True)
        goal = GOAL.format(problem="Table", words="Pull the plate", more="")
        (pro / "bddl_files" / f"libero_goal_{change}" / "open_the_drawer.bddl").write_text(goal)
        torch.save(np.zeros((50, 1)), pro / "init_files" / f"libero_goal_{change}" / "open_the_drawer.pruned_init")
    (pro / "benchmark").mkdir()
    names = {"libero_goal": ["open_the_drawer", "push_the_plate"]}
    (pro / "benchmark" / "libero_suite_task_map.py").write_text(f"libero_task_map = {names!r}")
    words = [tasks_of(f"libero_pro_goal_{change}", [0])[0].instruction for change in ("swap", "task")]
    assert words == ["open the drawer", "Pull the plate"] and limit_of("libero_pro_goal_swap") == 300
    with pytest.raises(EnvError, match=r"package has no bddl_files.libero_goal_swap.push_the_plate\.bddl"):
        tasks_of("libero_pro_goal_swap")
    with pytest.raises(EnvError, match="no suite 'libero_pro_goal_swop'; did you mean libero_pro_goal_swap"):
        tasks_of("libero_pro_goal_swop")


def test_tables_show_variants_by_category_and_by_the_difficulty_in_the_file(tmp_path):
    names = plus_names()[:3]
    groups = kind_spec("libero").task_groups
    assert list(groups("libero_plus_spatial", {}, names).values()) == ["camera", "noise", "robot"]
    rows = [
        {"name": name, "category": "", "difficulty_level": level}
        for name, level in zip(names, (1, 5, None), strict=True)
    ]
    file = tmp_path / "task_classification.json"
    file.write_text(json.dumps({"libero_spatial": rows}))
    options = {"task_classification": str(file)}
    by_level = groups("libero_plus_spatial", options, names)
    assert list(by_level.values()) == ["camera, level 1", "noise, level 5", "robot"]
    assert groups("libero_spatial", {}, ["anything"]) == {}
    file.write_text("[]")
    with pytest.raises(EnvError, match=r"is not LIBERO-Plus's task_classification\.json"):
        groups("libero_plus_goal", options, names)


def test_an_object_that_libero_does_not_define_is_named(simulated, monkeypatch):
    def build(**settings):
        raise KeyError("yellow_cabinet")

    monkeypatch.setattr(scene, "environment_class", lambda: build)
    monkeypatch.setattr(scene, "libero_module", lambda: scene)
    (task,) = tasks_of("libero_plus_spatial", [f"{BOWL}_level0_sample1"])
    with pytest.raises(EnvError, match=r"_sample1 needs the object .yellow_cabinet., which LIBERO does not"):
        scene.LiberoScene(task, assets=Path("/nowhere"), is_fast=True)
