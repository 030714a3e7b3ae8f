"""The report's section on samples: whole groups of completions, of the first step, the last one and some others."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from html import escape
from typing import Any

from rlinf.log_writers.base import sample_groups
from rlinf.report import html
from rlinf.report.axes import number, percent
from rlinf.report.records import WORST, RunRecords

NUM_GROUPS = 4
"""Groups filled of a step."""
NUM_COMPLETIONS = 64
"""Completions filled of a group."""
NOTE = (
    "All completions that were sampled for a prompt, with their rewards and the answers that were read from them; "
    "samples.jsonl has those of all steps."
)
LOOKS = {"right": "good", "wrong": "bad"}
"""Outcome -> look of its badge."""


def samples(records: RunRecords) -> str:
    """Returns the groups of the last and of the first step with samples, and folded those of steps in between."""
    rows = [row for row in records.samples if WORST not in row]
    steps = dict.fromkeys(sorted({row["step"] for row in rows if "step" in row}), "")
    for step in steps:
        groups = sample_groups([row for row in rows if row.get("step") == step])[:NUM_GROUPS]
        steps[step] = "".join(map(_group, groups))
    filled = [step for step, text in steps.items() if text]
    ends = dict.fromkeys([*filled[-1:], *filled[:1]])
    parts = [f'<p class="sub">Step {step + 1:,}</p>{steps[step]}' for step in ends]
    parts += [html.folded(f"Step {step + 1:,}", steps[step]) for step in filled if step not in ends]
    return html.section("Samples", *parts, note=NOTE if parts else "")


def _group(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns a prompt above its completions, which stand side by side."""
    rewards = [float(row["reward"]) for row in rows if _is_number(row.get("reward"))]
    facts = [f"{len(rows)} completion{'s' if len(rows) > 1 else ''}"]
    if rewards:
        facts.append(f"mean reward {number(sum(rewards) / len(rewards))}")
    if outcomes := [row["outcome"] for row in rows if "outcome" in row]:
        facts.append(f"{percent(outcomes.count('right') / len(outcomes))} right")
    if reference := _text(rows[0].get("reference_answer")):
        facts.append(f"reference answer {reference}")
    cards = "".join(map(_card, rows[:NUM_COMPLETIONS]))
    if len(rows) > NUM_COMPLETIONS:
        facts.append(f"the first {NUM_COMPLETIONS} are filled")
    return (
        f'<div class="group"><div class="long prompt">{escape(_text(rows[0].get("prompt")))}</div>'
        f'<p class="sub">{escape(", ".join(facts))}</p><div class="completions">{cards}</div></div>'
    )


def _card(row: Mapping[str, Any]) -> str:
    outcome = _text(row.get("outcome"))
    facts = [f"reward <b>{number(float(row['reward'])) if _is_number(row.get('reward')) else '-'}</b>"]
    for agent, reward in _json_object(_text(row.get("agent_rewards"))).items():
        facts.append(f"{escape(agent)} {number(float(reward))}" if _is_number(reward) else escape(agent))
    if outcome:
        facts.append(f'<span class="outcome {LOOKS.get(outcome, "")}">{escape(outcome)}</span>')
    if answer := _text(row.get("answer")):
        facts.append(f"answer {escape(answer)}")
    if row.get("truncated") is True:
        facts.append("cut at the token limit")
    if cause := _text(row.get("cause")):
        detail = _text(row.get("detail"))
        facts.append(escape(f"ended by {cause}" + (f": {detail}" if detail else "")))
    text, segments = escape(_text(row.get("completion"))), _text(row.get("segments"))
    if conversation := _json_list(segments):
        branches = _json_list(_text(row.get("branches")))
        facts.append(escape(f"tokens: {_origins([*conversation, *(one for branch in branches for one in branch)])}"))
        text = _conversations(conversation, branches)
    elif segments:
        facts.append(f"tokens: {escape(segments)}")
    line = " \N{MIDDLE DOT} ".join(facts)
    return f'<div class="completion"><div class="sub">{line}</div><div class="long">{text}</div></div>'


def _json_list(text: str) -> list[Any]:
    """Returns the list that the text encodes as JSON; an empty one for other texts."""
    value = _json(text)
    return value if isinstance(value, list) else []


def _json_object(text: str) -> dict[str, Any]:
    """Returns the object that the text encodes as JSON; an empty one for other texts."""
    value = _json(text)
    return value if isinstance(value, dict) else {}


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


def _conversations(last: Sequence[Mapping[str, Any]], others: Sequence[Sequence[Mapping[str, Any]]]) -> str:
    """Returns the conversations of agents by name in the order in which they began, or else the last branch of the only
    agent, then the other ones from where they leave it."""
    agents = [next((_text(one["agent"]) for one in part if "agent" in one), "") for part in (*others, last)]
    if any(agents):
        titles = (f"Conversation of {agent}" if agent else "Another branch" for agent in agents)
        titled = list(zip(titles, (*others, last), strict=True))
    else:
        titled = [("", last), *(("Another branch", part) for part in others)]
    return "".join(
        (f'<p class="sub">{escape(title)}</p>' if title else "") + _conversation(part) for title, part in titled
    )


def _conversation(segments: Sequence[Mapping[str, Any]]) -> str:
    """Returns the texts of an episode. The title of each is its agent or author, and the version of the policy's
    weights."""
    spans = []
    for one in segments:
        author = _text(one.get("author"))
        version = f", version {one['version']}" if "version" in one else ""
        tokens = one.get("num_tokens", 0)
        label = f"{_text(one.get('agent')) or author}{version}, {tokens} token{'s' if tokens != 1 else ''}"
        spans.append(
            f'<span class="by {escape(author)}" title="{escape(label)}">{escape(_text(one.get("text")))}</span>'
        )
    return "".join(spans)


def _origins(segments: Sequence[Mapping[str, Any]]) -> str:
    """Returns how many tokens came from whom, such as `policy 12 (versions 3 to 4), tool 5`."""
    counts: dict[str, int] = {}
    versions: dict[str, set[int]] = {}
    for one in segments:
        origin = _text(one.get("agent")) or _text(one.get("author"))
        counts[origin] = counts.get(origin, 0) + int(one.get("num_tokens", 0))
        if "version" in one:
            versions.setdefault(origin, set()).add(int(one["version"]))
    return ", ".join(f"{origin} {count}{_versions(versions.get(origin, ()))}" for origin, count in counts.items())


def _versions(versions: Collection[int]) -> str:
    if not versions:
        return ""
    first, last = min(versions), max(versions)
    return f" (version {first})" if first == last else f" (versions {first} to {last})"


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300


def _text(value: Any) -> str:
    return "" if value is None else str(value)
