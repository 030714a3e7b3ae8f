"""Draws flows as Mermaid flowcharts."""

from collections.abc import Sequence

from rlinf_sched.flow_graph import FlowGraph


def flow_diagram(graph: FlowGraph) -> str:
    """The flow as a Mermaid flowchart: stages as boxes, channels as labelled arrows, weights as dotted ones.

    A worker group with several stages is drawn as a box around them. Stages of a cycle and those that train are
    labelled.
    """
    graph.validate()
    ids = {stage.name: f"s{i}" for i, stage in enumerate(graph.stages)}
    group_ids = {}
    in_cycle = {name for cycle in graph.cycles() for name in cycle}
    lines = ["flowchart LR"]
    if graph.feeds:
        lines.append('  feed(["driver"])')
    for i, (worker, names) in enumerate(graph.workers.items()):
        boxes = [f'{ids[name]}["{_label(graph, name, name in in_cycle)}"]' for name in names]
        group_ids[worker] = ids[names[0]] if len(names) == 1 else f"g{i}"
        if len(names) == 1:
            lines.append(f"  {boxes[0]}")
        else:
            lines += [f'  subgraph g{i}["{_escape(worker)}"]', *(f"    {box}" for box in boxes), "  end"]
    if graph.collects:
        lines.append('  collect(["driver"])')
    for channel in graph.channels:
        sources = ["feed"] * (channel in graph.feeds) + [ids[name] for name in graph.writers(channel)]
        targets = [ids[name] for name in graph.readers(channel)] + ["collect"] * (channel in graph.collects)
        lines += [f'  {source} -->|"{_escape(channel)}"| {target}' for source in sources for target in targets]
    for edge in graph.weight_edges:
        lines.append(f'  {group_ids[edge.source]} -. "weights" .-> {group_ids[edge.target]}')
    return "\n".join(lines) + "\n"


def _label(graph: FlowGraph, name: str, in_cycle: bool) -> str:
    stage = graph.stage(name)
    notes = ["trains"] * stage.trains + ["cycle"] * in_cycle + ["host"] * (not stage.needs_device)
    parts = [_escape(name)]
    if stage.role != name:
        parts.append(_escape(stage.role))
    if notes:
        parts.append(", ".join(notes))
    return "<br/>".join(parts)


def _escape(text: str) -> str:
    """Mermaid's own entity codes, so that a name cannot end its label or pass for markup."""
    return text.replace("#", "#35;").replace('"', "#quot;").replace("<", "#lt;").replace(">", "#gt;")


def index_ranges(indices: Sequence[int]) -> str:
    """(0, 1, 2, 5) -> "0-2, 5"; the order given is kept."""
    runs: list[list[int]] = []
    for index in indices:
        if runs and index == runs[-1][-1] + 1:
            runs[-1].append(index)
        else:
            runs.append([index])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)
