"""Runs a reshard plan within one process: from the sources' tensors straight into a destination's, cast on the way.

The sources' tensors may be anything this process can read: its own, or those of other processes that came by reference
(rlinf_comm.pool). Nothing is attested here; WeightSender and WeightReceiver do that, `verify` too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from rlinf_comm.copies import COPY_DTYPES, CopyProgram, CopyTable, StridedCopy, addresses_of, code_of_dtype
from rlinf_comm.errors import LayoutError
from rlinf_comm.weights.layout import BufferSpec
from rlinf_comm.weights.plan import ReshardPlan
from rlinf_comm.weights.region import BoxRegion, check_tensor, extent_bytes, region_in
from rlinf_comm.weights.unlisted import check_used, checked_patterns, left_out

if TYPE_CHECKING:
    import torch

_NUM_KEPT = 64
"""Executors that `execute` keeps: one for each destination rank of a few plans."""


class ReshardExecutor:
    """The copies that fill one destination rank's tensors, lowered at the first run and for other strides.

        executor = ReshardExecutor(plan, dst_rank=1)
        executor.run([rank0_tensors, rank1_tensors], own_tensors, num_threads=2)

    Args:
        leave_out: Patterns, as in a shell, of whole names of tensors which the ranks have beside those of their
            layouts: ["*.rotary_emb.inv_freq"]. Any other tensor beside the layout is refused.

    Raises:
        LayoutError: the plan has no such destination rank, or a pattern matches a tensor of a layout.
    """

    def __init__(self, plan: ReshardPlan, dst_rank: int = 0, *, leave_out: Collection[str] = ()) -> None:
        table = plan.copies(dst_rank=dst_rank)
        self._plan, self._dst_rank = plan, dst_rank
        buffers = dict.fromkeys(name for rank in (*plan.src_buffers, plan.dst_buffers[dst_rank]) for name in rank)
        self._leave_out = checked_patterns(leave_out, buffers, "a source rank or the destination")
        self._used, numbers = np.unique(table.src_buffer, return_inverse=True)
        """The sources' buffers that are read, counted over all source ranks."""
        assert table.src_bytes is not None, "the plan gives the sizes of all buffers"
        self._table = replace(table, src_buffer=numbers.astype(np.int32), src_bytes=table.src_bytes[self._used])
        names = [(rank, name) for rank, buffers in enumerate(plan.src_buffers) for name in buffers]
        self._sources = [names[number] for number in self._used.tolist()]
        self._programs: dict[tuple[tuple[int, ...], ...], CopyProgram] = {}

    @property
    def src_ranks(self) -> list[int]:
        """The source ranks that are read."""
        return sorted({rank for rank, _ in self._sources})

    def run(
        self,
        sources: Sequence[Mapping[str, torch.Tensor]] | Mapping[int, Mapping[str, torch.Tensor]],
        destination: Mapping[str, torch.Tensor],
        *,
        num_threads: int = 1,
    ) -> None:
        """Copies the weights; other Python threads run meanwhile.

        Args:
            sources: By source rank, that rank's buffers by name. Ranks and buffers that this destination does not need
                may be missing. CPU tensors of any strides.
            destination: This rank's buffers by name. What no block covers (padding) keeps its value.

        Raises:
            LayoutError: a tensor is missing, is not what the layout says, or is in no layout and not left out; names
                it and its rank. Or a pattern of `leave_out` matches nothing.
        """
        check_used(self.left_out(sources, destination), "these sources and this destination")
        self._run(sources, destination, num_threads)

    def left_out(
        self,
        sources: Sequence[Mapping[str, torch.Tensor]] | Mapping[int, Mapping[str, torch.Tensor]],
        destination: Mapping[str, torch.Tensor],
    ) -> list[dict[str, tuple[str, ...]]]:
        """Returns, for each rank that is given, the tensors that each pattern leaves out.

        Raises:
            LayoutError: a source rank that the plan has not, or a tensor in no layout and not left out.
        """
        plan = self._plan
        of_sources = []
        for rank, tensors in sources.items() if isinstance(sources, Mapping) else enumerate(sources):
            if not 0 <= rank < plan.num_src_ranks:
                raise LayoutError(f"tensors of source rank {rank}; the plan has {plan.num_src_ranks} source ranks")
            of_sources.append(left_out(f"source rank {rank}", tensors, plan.src_buffers[rank], self._leave_out))
        who = f"destination rank {self._dst_rank}"
        return [*of_sources, left_out(who, destination, plan.dst_buffers[self._dst_rank], self._leave_out)]

    def _run(self, sources: object, destination: Mapping[str, torch.Tensor], num_threads: int) -> None:
        plan = self._plan
        read = []
        for rank, name in self._sources:
            read.append(_checked(f"source rank {rank}", sources, rank, name, plan.src_buffers[rank][name]))
        written = [
            _checked(f"destination rank {self._dst_rank}", {0: destination}, 0, name, spec)
            for name, spec in plan.dst_buffers[self._dst_rank].items()
        ]
        self._program(read, written).run(addresses_of(read), addresses_of(written), num_threads)

    def _program(self, read: list[torch.Tensor], written: list[torch.Tensor]) -> CopyProgram:
        tensors = read + written
        is_dense = all(tensor.is_contiguous() for tensor in tensors)
        key = () if is_dense else tuple(tensor.stride() for tensor in tensors)
        program = self._programs.get(key)
        if program is None:
            program = CopyProgram(self._table if is_dense else self._strided(read, written))
            self._programs = {key: program}  # replaced, not changed: other threads may look at it
        return program

    def _strided(self, read: list[torch.Tensor], written: list[torch.Tensor]) -> CopyTable:
        """The moves one by one, for tensors that are not all contiguous."""
        table = self._plan.table.select((self._plan.table.dst_rank == self._dst_rank) & ~self._plan.table.tied)
        number_of = {source: number for number, source in enumerate(self._sources)}
        names = [list(buffers) for buffers in self._plan.src_buffers]
        copies = []
        for row in range(len(table.tensor)):
            shape = tuple(table.length[row].tolist())
            src = number_of[table.src_rank[row], names[table.src_rank[row]][table.src_buffer[row]]]
            sides = []
            for tensor, offset, strides in (
                (read[src], table.src_offset[row], table.src_strides[row]),
                (written[table.dst_buffer[row]], table.dst_offset[row], table.dst_strides[row]),
            ):
                region = region_in(tensor, BoxRegion("", int(offset), shape, tuple(strides.tolist())))
                sides.append((region.pointer - tensor.data_ptr(), region.strides_bytes, _code(tensor)))
            (src_offset, src_strides, src_dtype), (dst_offset, dst_strides, dst_dtype) = sides
            copies.append(
                StridedCopy(
                    src_buffer=src,
                    dst_buffer=int(table.dst_buffer[row]),
                    shape=shape,
                    src_strides=src_strides,
                    dst_strides=dst_strides,
                    src_dtype=src_dtype,
                    dst_dtype=dst_dtype,
                    src_offset=src_offset,
                    dst_offset=dst_offset,
                )
            )
        return CopyTable.of(
            copies, src_bytes=[extent_bytes(one) for one in read], dst_bytes=[extent_bytes(one) for one in written]
        )


def execute(
    plan: ReshardPlan,
    sources: Sequence[Mapping[str, torch.Tensor]] | Mapping[int, Mapping[str, torch.Tensor]],
    destinations: Sequence[Mapping[str, torch.Tensor]],
    *,
    num_threads: int = 1,
    leave_out: Collection[str] = (),
) -> None:
    """Fills the tensors of all destination ranks; what it prepares is kept for the next time. See ReshardExecutor.

    Raises:
        LayoutError: not one destination for each rank of the plan, or as ReshardExecutor and its run.
    """
    if len(destinations) != plan.num_dst_ranks:
        raise LayoutError(f"tensors of {len(destinations)} destination ranks for a plan with {plan.num_dst_ranks}")
    patterns = leave_out if isinstance(leave_out, str) else tuple(leave_out)  # a text is refused below
    executors = [_kept_executor(plan, dst_rank, leave_out=patterns) for dst_rank in range(plan.num_dst_ranks)]
    pairs = list(zip(executors, destinations, strict=True))
    check_used([names for one, own in pairs for names in one.left_out(sources, own)], "these sources and destinations")
    for executor, destination in pairs:
        executor._run(sources, destination, num_threads)


_kept_executor = lru_cache(maxsize=_NUM_KEPT)(ReshardExecutor)


def _checked(where: str, ranks: object, rank: int, name: str, spec: BufferSpec) -> torch.Tensor:
    try:
        tensor = ranks[rank][name]  # pyright: ignore[reportIndexIssue] - a sequence or a mapping
    except (LookupError, TypeError):
        raise LayoutError(f"{name}: {where} has no such tensor, and the plan needs it") from None
    check_tensor(f"{where}: {name}", tensor, spec)
    return tensor


def _code(tensor: torch.Tensor) -> str:
    return COPY_DTYPES[code_of_dtype(tensor.dtype)]
