"""The page of a plan: whole, escaped, small at a thousand devices, and true to the timeline."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest

from rlinf.plan_page import render
from rlinf.plan_page.gantt import DEVICE_HEIGHT, LABEL_WIDTH, NUM_BINS
from rlinf_sched import (
    Cluster,
    FlowGraph,
    InstanceProfile,
    Plan,
    Prediction,
    Problem,
    Profiles,
    RunnerUp,
    Stage,
    StageProfile,
    TimePoint,
    WeightEdge,
    plan_for_mode,
)
from rlinf_sched.explain import PlanExplanation, Spans, explain
from rlinf_sched.explain.spans import KINDS
from rlinf_sched.explain.what_if import WhatIf

pytestmark = pytest.mark.usefixtures("brief_search")

VOID = {"meta", "br", "rect", "line", "path"}
STAGES = ("rollout", "reference", "reward", "critic", "actor")
STEP_S = 100.0


class Page(HTMLParser):
    """Checks that tags are balanced; collects what the page says."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open_tags: list[str] = []
        self.says = ""
        self.tips: list[str] = []
        self.feed(text)
        assert self.open_tags == []

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tips += [value for key, value in attrs if key == "data-tip"]
        if tag not in VOID:
            self.open_tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag not in VOID:
            assert self.open_tags.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open_tags and self.open_tags[-1] not in ("style", "script"):
            self.says += data + "\n"


def make_problem(num_nodes: int, num_devices_per_node: int, name: str = "ppo") -> Problem:
    channels = ["prompts", *(f"after {stage}" for stage in STAGES[:-1])]
    flow = FlowGraph(
        name=name,
        stages=tuple(
            Stage(
                name=stage,
                worker=stage,
                role=stage,
                reads=(channels[i],),
                writes=tuple(channels[i + 1 : i + 2]),
                needs_device=stage != "reward",
                trains=stage in ("critic", "actor"),
            )
            for i, stage in enumerate(STAGES)
        ),
        weight_edges=(WeightEdge(source="actor", target="rollout"),),
        feeds=("prompts",),
    )
    profiles = {
        stage: StageProfile(
            instances=(
                InstanceProfile(
                    num_devices=0 if stage == "reward" else 1,
                    points=(TimePoint(num_items=1, seconds=1.0),),
                    state_bytes=10 << 30,
                    work_bytes=20 << 30,
                ),
            )
        )
        for stage in STAGES
    }
    cluster = Cluster.cuda_nodes(num_nodes, num_devices_per_node, name="GPU", memory_bytes=80 << 30)
    return Problem(flow=flow, profiles=Profiles(stages=profiles), cluster=cluster, num_items=4096)


def make_explanation(problem: Problem, plan: Plan, answers: tuple[WhatIf, ...] = ()) -> PlanExplanation:
    """Stage i computes from 20 i seconds on; rank by rank it ends a little earlier."""
    rows = [
        (i, rank, 20.0 * i, 20.0 * i + 20.0 - 10.0 * rank / max(1, plan.stage(stage).num_ranks))
        for i, stage in enumerate(STAGES)
        for rank in range(plan.stage(stage).num_ranks)
    ]
    columns = np.array(rows)
    spans = Spans(
        step_s=STEP_S,
        length_s=STEP_S,
        stages=STAGES,
        stage=columns[:, 0].astype(int),
        rank=columns[:, 1].astype(int),
        kind=np.full(len(rows), KINDS.index("compute")),
        start_s=columns[:, 2],
        end_s=columns[:, 3],
        num_items=np.ones(len(rows), dtype=int),
    )
    other = RunnerUp(mode="hybrid", step_s=130.0, reason="critic & actor wait")
    prediction = Prediction(estimate_s=0.0, step_s=STEP_S, sync_s=0.0, stages={}, runners_up=(other,))
    path: dict[str, float] = dict.fromkeys(STAGES, 20.0)
    return explain(problem, replace(plan, prediction=prediction), spans, path, answers)


@pytest.fixture
def collocated() -> PlanExplanation:
    problem = make_problem(1, 4)
    return make_explanation(problem, plan_for_mode(problem.flow, problem.cluster, "collocated"))


def test_the_page_is_whole_and_loads_nothing(collocated: PlanExplanation):
    text = render(collocated)
    page = Page(text)
    assert not re.search(r"""(src|href)=|url\(|@import""", text)
    for words in (
        "100 s",
        "In plain words",
        "rollout, reference, critic and actor take turns on the same devices",
        "Critical path",
        "critic & actor wait",
        "+30.0%",
        "30.0 GiB",
        "s since the start of the step",
        "actor → rollout",
    ):
        assert words in page.says


def test_where_steps_overlap_the_page_says_what_is_drawn(collocated: PlanExplanation):
    """The step of 100 s as two steps of 50 s each."""
    flow = replace(collocated.problem.flow, max_staleness=1)
    spans = replace(collocated.spans, step_s=STEP_S / 2, num_steps=2)
    page = Page(render(replace(collocated, problem=replace(collocated.problem, flow=flow), spans=spans)))
    for words in (
        "predicted time from step to step\n50 s",
        "Timeline of the steady state, 2 steps",
        "s since the end of an earlier step",
        "ends every 50 s",
    ):
        assert words in page.says
    assert "rollout\n0 ms to 20 s" in page.tips


def test_names_are_escaped():
    problem = make_problem(1, 2, name="<script>x</script>")
    plan = plan_for_mode(problem.flow, problem.cluster, "collocated")
    text = render(make_explanation(problem, plan))
    assert "<script>x" not in text
    assert "<script>x</script>" in Page(text).says


def test_a_row_of_one_device_has_an_area_where_a_stage_computes(collocated: PlanExplanation):
    text = render(collocated)
    areas = re.findall(r'<path fill="([^"]+)" d="([^"]+)"', text)[:4]
    expected = [("var(--c0)", 0, 20), ("var(--c1)", 20, 40), ("var(--c3)", 60, 80), ("var(--c4)", 80, 100)]
    for (color, outline), (expected_color, start_s, end_s) in zip(areas, expected, strict=True):
        xs = [int(x) for x in re.findall(r"[MH](\d+)", outline)]
        assert color == expected_color
        assert min(xs) == pytest.approx(LABEL_WIDTH + start_s / STEP_S * NUM_BINS, abs=1)
        assert max(xs) == pytest.approx(LABEL_WIDTH + end_s / STEP_S * NUM_BINS, abs=1)
    assert "rollout\n0 ms to 20 s" in Page(text).tips


def test_hand_overs_of_a_few_pixels_are_drawn_as_their_mean():
    problem = make_problem(1, 2)
    plan = plan_for_mode(problem.flow, problem.cluster, "collocated")
    starts = np.arange(0.0, 50.0, 0.25)  # 2.3 units; half of each is idle
    spans = Spans(
        step_s=STEP_S,
        length_s=STEP_S,
        stages=STAGES,
        stage=np.zeros(len(starts), dtype=int),
        rank=np.zeros(len(starts), dtype=int),
        kind=np.full(len(starts), KINDS.index("compute")),
        start_s=starts,
        end_s=starts + 0.125,
        num_items=np.ones(len(starts), dtype=int),
    )
    text = render(explain(problem, plan, spans, {}))
    (outline,) = re.findall(r'<path fill="var\(--c0\)" d="([^"]+)"', text)
    assert outline.count("V") < 10  # one level, but for the last cell
    base = float(outline.split("V")[-1].partition("H")[0])
    assert base - float(re.findall(r"M\d+ ([\d.]+)", outline)[0]) == pytest.approx(DEVICE_HEIGHT / 2, rel=0.2)
    assert "25.0\xa0% busy" in Page(text).says


def test_a_thousand_devices_have_few_rows_and_a_small_page():
    problem = make_problem(128, 8)
    plan = plan_for_mode(problem.flow, problem.cluster, "disaggregated")
    text = render(make_explanation(problem, plan))
    page = Page(text)
    lanes = re.findall(r'<text class="lane"[^>]*>([^<]+)<', text)
    assert lanes == [
        *("devices 0-255", "device 0", "device 128", "device 255"),
        *("devices 256-511", "device 256", "device 384", "device 511"),
        *("devices 512-767", "device 512", "device 640", "device 767"),
        *("devices 768-1023", "device 768", "device 896", "device 1023"),
        "host",
    ]
    assert len(text) < 200_000
    # Every rank computes for 10 s and 0 to 10 s more: on average 3/4 of the 256 devices over 20 s.
    (mean,) = [float(m[1]) for tip in page.tips if (m := re.match(r"rollout\n.*\n(\d+) of 256 devices", tip))]
    assert mean == pytest.approx(0.75 * 256, rel=0.02)


def test_what_if_answers_are_shown_only_where_asked(collocated: PlanExplanation):
    assert "What if" not in Page(render(collocated)).says
    answer = WhatIf(
        question="no offload",
        meaning="state stays",
        step_s=None,
        mode=None,
        num_devices=4,
        text="actor: 12 GiB too much",
    )
    says = Page(render(replace(collocated, answers=(answer,)))).says
    assert "does not fit" in says and "actor: 12 GiB too much" in says


def test_careful_notes_come_first(collocated: PlanExplanation):
    noted = replace(collocated, notes=("profiles.stages.actor: beyond",))
    says = Page(render(noted)).says
    assert says.index("Be careful") < says.index("In plain words")
