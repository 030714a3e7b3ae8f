"""The weight sync edges of the open flows: the transport of each, and the version last published on it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from rlinf_comm.weights import Layout, ReshardPlan, reshard_plan as reshard_plan
from rlinf_comm.weights.layouts import has_adapter, quantized_layout, quantized_names
from rlinf_sched import WeightEdge
from rlinf_workers.errors import FlowDefinitionError, RemoteError, WeightSyncRefused
from rlinf_workers.execution.groups import RunningGroups
from rlinf_workers.plugins import WEIGHT_SYNCS
from rlinf_workers.weight_sync.base import SyncedTensors, UnmergedLayout, WeightPort, WeightSync
from rlinf_workers.weight_sync.choose import choose
from rlinf_workers.weight_sync.spec import EdgeEnds


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """One sync of an edge, and what it moves."""

    tensors: SyncedTensors
    reshard: ReshardPlan
    quantized: tuple[str, ...] = ()


class WeightEdges:
    """Opens a weight sync for each edge when it is first synced.

    Args:
        weight_sync: a name in plugins.WEIGHT_SYNCS, or an import path; auto: chosen by where the two ends are.
        options: further arguments of its constructor.
        attests: whether servers compare digests of what they hold with what was published.
        note: called with a sentence about each fall-back.
    """

    def __init__(
        self,
        groups: RunningGroups,
        *,
        weight_sync: str,
        options: Mapping[str, Any],
        attests: bool,
        note: Callable[[str], None],
    ) -> None:
        self._groups, self._note = groups, note
        self._weight_sync, self._options, self._attests = weight_sync, dict(options), attests
        self.weight_syncs: dict[WeightEdge, list[WeightSync]] = {}
        """One, or two: of frozen weights and of those that training changes."""
        self.versions: dict[WeightEdge, int] = {}
        """The last published version."""
        self.num_bytes: dict[WeightEdge, int] = {}
        """Bytes that a sync of a version moves."""

    def sync(self, edges: Iterable[WeightEdge], *, num_versions: int = 1, offered: Collection[WeightEdge] = ()) -> None:
        """Publishes the trainers' current weights.

        Args:
            num_versions: versions of which one may still have to be received when all have been published.
            offered: edges on which each rank receives what it likes, see `Flow.weights`.
        """
        for edge in edges:
            if edge not in self.weight_syncs:
                self._connect(edge, num_versions, is_offered=edge in offered)
                if len(self.weight_syncs[edge]) > 1:
                    self._groups[edge.source].call("publish_frozen_weights", edge.name)
            self.versions[edge] = self._groups[edge.source].call("publish_weights", edge.name)[0]

    def were_published(self, names: Collection[str], version: int) -> None:
        """Records that a stage has published this version on the edges with these names."""
        self.versions |= {edge: version for edge in self.versions if edge.name in names}

    def forget(self) -> None:
        """Drops all weight syncs; nothing counts as published any more."""
        self.weight_syncs.clear()
        self.versions.clear()

    def _connect(self, edge: WeightEdge, num_versions: int, *, is_offered: bool) -> None:
        num_ranks, parts = self._groups[edge.target].num_ranks, self._parts(edge)
        self.num_bytes[edge] = _num_bytes(parts[-1].reshard)
        each = parts[-1].reshard.num_dst_ranks // num_ranks
        targets = [self._groups.node(edge.target, rank) for rank in range(num_ranks) for _ in range(each)]
        on_gpus = self._groups.is_on_gpus(edge.source) and self._groups.is_on_gpus(edge.target)
        ends = EdgeEnds(
            sources=tuple(self._groups.nodes(edge.source)),
            targets=targets,
            on_gpus=on_gpus,
            same_versions=not is_offered or num_ranks == 1,
        )
        more = {"num_versions": num_versions} if num_versions > 2 else {}  # any weight sync keeps two
        choices = choose(self._weight_sync, {**more, **self._options}, ends)
        if not self._attests:
            self._note(f"weights {edge.name} are not attested: served weights are not compared with published ones")
        for number, (kind, options) in enumerate(choices):
            try:
                self.weight_syncs[edge] = [self._open(edge, part, kind, options) for part in parts]
                return
            except RemoteError as error:
                if error.error_type != WeightSyncRefused.__name__ or number + 1 == len(choices):
                    raise
                self._note(f"weights {edge.name} are sent by {choices[number + 1][0]} and not by {kind}: {error}")

    def _parts(self, edge: WeightEdge) -> list[_Part]:
        """The syncs of an edge; the last one moves what changes."""
        source = self._layout(edge.source, "layout")
        if source.num_ranks != self._groups[edge.source].num_ranks:
            raise self._wrong_layout(edge.source, source)
        served = self._layout(edge.target, "served_layout", edge.source)
        unmerged: UnmergedLayout | None = self._groups[edge.source].call("unmerged_layout", ranks=[0])[0]
        if unmerged is not None and has_adapter(served.specs):
            return self._adapter_parts(edge, unmerged, served)
        quantized = quantized_names(source.specs, served.specs)
        source = quantized_layout(source, quantized) if quantized else source
        reshard = reshard_plan(source, served.with_dtypes_of(source.specs))
        if unmerged is not None:
            self._note(
                f"weights {edge.name}: {edge.target} serves no adapter, so it is merged into the weights that it "
                f"changes, and a sync moves all of them, {_num_bytes(reshard):,} bytes"
            )
        return [_Part(tensors="all", reshard=reshard, quantized=quantized)]

    def _adapter_parts(self, edge: WeightEdge, unmerged: UnmergedLayout, served: Layout) -> list[_Part]:
        """The frozen weights, which are moved once, and the adapter."""
        specs, names = unmerged.layout.specs, unmerged.layout.specs.keys() | served.specs.keys()
        kinds: dict[SyncedTensors, Collection[str]] = {
            "frozen": frozenset(unmerged.frozen),
            "trained": names - frozenset(unmerged.frozen),
        }
        parts = [
            _Part(
                tensors=kind,
                reshard=reshard_plan(unmerged.layout.only(chosen), served.with_dtypes_of(specs).only(chosen)),
            )
            for kind, chosen in kinds.items()
        ]
        once, each = (_num_bytes(part.reshard) for part in parts)
        self._note(
            f"weights {edge.name}: a sync moves the adapter, {each:,} bytes; the frozen weights, {once:,} bytes, are "
            "moved once"
        )
        return parts

    def _open(self, edge: WeightEdge, part: _Part, kind: str, options: Mapping[str, Any]) -> WeightSync:
        reshard, weight_sync = part.reshard, WEIGHT_SYNCS.get(kind)
        if "num_versions" in options and not _takes_num_versions(weight_sync):
            raise FlowDefinitionError(
                f"weights {edge.name}: steps overlap so far that num_versions={options['num_versions']} are kept, and "
                f"weight sync {kind} keeps two; give it that argument, or use max_staleness 0 or 1"
            )
        opened = weight_sync(edge.name, reshard, **options)
        sides: dict[Literal["send", "receive"], str] = {"send": edge.source, "receive": edge.target}
        for side, name in sides.items():
            handles = self._groups[name].handles
            num_ends = reshard.num_src_ranks if side == "send" else reshard.num_dst_ranks
            ports = [
                WeightPort(
                    edge=edge.name,
                    side=side,
                    rank=rank,
                    reshard=reshard,
                    weight_sync=kind,
                    address=opened.address,
                    quantized=part.quantized,
                    tensors=part.tensors,
                    attests=self._attests,
                )
                for rank in range(num_ends)
            ]
            each = num_ends // len(handles)
            opening = [
                handle.call("open_weights", ports[rank * each : (rank + 1) * each])
                for rank, handle in enumerate(handles)
            ]
            self._groups.gather(opening)
        return opened

    def _layout(self, name: str, method: str, *arguments: Any) -> Layout:
        group = self._groups[name]
        layout: Layout = group.call(method, *arguments, ranks=[0])[0]
        if layout.num_ranks % group.num_ranks:
            raise self._wrong_layout(name, layout)
        return layout

    def _wrong_layout(self, name: str, layout: Layout) -> FlowDefinitionError:
        num_ranks = self._groups[name].num_ranks
        return FlowDefinitionError(
            f"worker {name!r}: layout() describes {layout.num_ranks} ranks, but there are {num_ranks}"
        )


def _num_bytes(reshard: ReshardPlan) -> int:
    """Bytes of the tensors that a sync moves, each once."""
    return sum(spec.num_bytes for spec in reshard.specs.values())


def _takes_num_versions(weight_sync: Callable[..., Any]) -> bool:
    parameters = inspect.signature(weight_sync).parameters.values()
    return any(one.name == "num_versions" or one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters)
