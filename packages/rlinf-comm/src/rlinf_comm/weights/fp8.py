"""Weights in FP8 with a scale for each block of 128 x 128, made of a trainer's weights before they are sent.

    w[i, j] = q[i, j] * s[i // 128, j // 128]      q: float8_e4m3fn, s: float32, max |w| of the block / 448

as in DeepSeek-V3 (arXiv:2412.19437, section 3.3), whose checkpoints name the scales `weight_scale_inv`, and as SGLang
and vLLM serve with `quant_method: fp8, weight_block_size: [128, 128]`. Quotients are rounded to the nearest even in
float32 and then in FP8, so equal weights give equal bytes on every device. Stacks of experts [E, rows, columns] have
blocks in their last two dimensions.

    names = quantized_names(trained.specs, served.specs)        served in FP8 and trained in another dtype
    published = quantized_layout(trained, names)                both in layouts/quantized.py
    quantizer = BlockQuantizer(trained, rank, names)
    quantizer.quantized(tensors)                                the rank's buffers in `published`

Ranks that store parts of a block have to agree about its scale: they exchange the maxima of their parts.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlinf_comm.errors import CommError
from rlinf_comm.weights.layout import Block, Layout, TensorSpec
from rlinf_comm.weights.layouts.canonical import FP8_DTYPE
from rlinf_comm.weights.layouts.quantized import BLOCK, parts_of, scale_shape, scales_of

LARGEST = torch.finfo(torch.float8_e4m3fn).max
CHUNK = 1 << 26
"""Weights of a stack of experts that are quantized at once; a matrix is not cut."""
SMALLEST_SCALE = torch.finfo(torch.float32).tiny
"""Some kernels would flush a scale that is not a normal number to 0. A block whose scale would be smaller is rounded
more coarsely."""


class NonFiniteWeightError(CommError, ValueError):
    """A weight is infinite or not a number, so that its block has no scale."""

    def __init__(self, name: str) -> None:
        super().__init__(f"{name}: a weight is infinite or not a number, and FP8 has no scale for its block")
        self.name = name


def quantize(weight: Tensor, name: str = "weight") -> tuple[Tensor, Tensor]:
    """A weight [..., rows, columns] of any floating-point dtype -> its FP8 values, and float32 scales (`scale_shape`).

    Raises: NonFiniteWeightError with the name.
    """
    spec = TensorSpec(tuple(weight.shape), FP8_DTYPE)
    part = _Part(Block(name, spec.whole, name, 0, spec.index_strides))
    maxima = weight.new_zeros(scale_shape(spec.shape), dtype=torch.float32)
    part.add_maxima(weight, maxima)
    scales = _scales_of({name: maxima})[name]
    return part.values(weight, scales), scales


def dequantize(values: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """The inverse, up to rounding: products in float32, rounded to `dtype`."""
    if values.is_cuda:
        factors, weight = scales, values.to(torch.float32)
    else:
        # torch converts FP8 one by one on a CPU. Its bits are those of a float16 whose exponent is 8 less: 4 times as
        # fast, and exact.
        bits = (values.view(torch.int8).to(torch.int16) << 7) & ~(1 << 14)
        factors, weight = scales * 2.0**8, bits.view(torch.float16).to(torch.float32)
    for dim in (-2, -1):
        if (size := values.shape[dim]) > BLOCK:
            factors = factors.repeat_interleave(BLOCK, dim).narrow(dim, 0, size)
    return weight.mul_(factors).to(dtype)


# -- on the way from a trainer -----------------------------------------------------------------------------------------


class BlockQuantizer:
    """Quantizes what one rank of a trainer publishes.

    Args:
        layout: of the trainer.
        names: of `quantized_names`.
    """

    def __init__(self, layout: Layout, rank: int, names: Collection[str]) -> None:
        own, chosen = layout.ranks[rank], frozenset(names)
        self._parts = [(buffer, _Part(block)) for buffer, block in parts_of(own, chosen)]
        self._others = sorted({block.buffer for block in own.blocks if block.name not in chosen})
        self._shapes = {name: scale_shape(layout.specs[name].shape) for name in sorted(chosen)}
        self._is_cut = any(
            block.name in chosen and block.box != layout.specs[block.name].whole
            for one in {id(one): one for one in layout.ranks}.values()
            for block in one.blocks
        )

    @property
    def buffers(self) -> frozenset[str]:
        """The trainer's buffers that have weights to quantize."""
        return frozenset(part.block.buffer for _, part in self._parts)

    @torch.no_grad()
    def quantized(
        self, tensors: Mapping[str, Tensor], merge: Callable[[Tensor], object] | None = None
    ) -> dict[str, Tensor]:
        """New tensors for what is quantized, and all others as they are.

        Args:
            tensors: the rank's buffers, as in the trainer's layout, on any device.
            merge: sets each element of a tensor to its maximum over all ranks, in place. Called by every rank, where
                ranks store parts of tensors.

        Raises: NonFiniteWeightError, on every rank that has a part of the tensor.
        """
        maxima: dict[str, Tensor] = {}
        for _, part in self._parts:
            tensor = tensors[part.block.buffer]
            if part.name not in maxima:
                maxima[part.name] = tensor.new_zeros(self._shapes[part.name], dtype=torch.float32)
            part.add_maxima(tensor, maxima[part.name])
        if self._is_cut and merge is not None:
            self._merge(maxima, merge, next(iter(tensors.values())).device)
        scales = _scales_of(maxima)
        published = {name: tensors[name] for name in self._others}
        for buffer, part in self._parts:
            published[buffer] = part.values(tensors[part.block.buffer], scales[part.name])
        return published | {scales_of(name): one for name, one in scales.items()}

    @contextlib.contextmanager
    def rounded(self, tensors: Mapping[str, Tensor], merge: Callable[[Tensor], object] | None = None) -> Iterator[None]:
        """A context in which the tensors hold what their quantized values and scales stand for, as `dequantize` gives
        it in their dtype. Afterwards they are as before, to the bit.

        Args:
            tensors: contiguous buffers, which are changed in place.
            merge: as in `quantized`.
        """
        published = self.quantized(tensors, merge)
        earlier: list[tuple[Tensor, Tensor]] = []
        with torch.no_grad():
            for buffer, part in self._parts:
                own = part.view(tensors[part.block.buffer])
                earlier.append((own, own.clone()))
                own.copy_(part.weights(published[buffer], published[scales_of(part.name)]))
        try:
            yield
        finally:
            with torch.no_grad():
                for own, values in earlier:
                    own.copy_(values)

    def _merge(self, maxima: dict[str, Tensor], merge: Callable[[Tensor], object], device: torch.device) -> None:
        """Completes the maxima with those of other ranks; in one collective, whose elements are the same on each."""
        zeros = {name: torch.zeros(shape, device=device) for name, shape in self._shapes.items() if name not in maxima}
        of_all = maxima | zeros
        flat = torch.cat([of_all[name].flatten() for name in self._shapes])
        merge(flat)
        sizes = [torch.Size(shape).numel() for shape in self._shapes.values()]
        for (name, shape), merged in zip(self._shapes.items(), flat.split(sizes), strict=True):
            if name in maxima:
                maxima[name] = merged.view(shape)


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of a tensor that lies in one buffer of a rank; it may begin and end within blocks."""

    block: Block

    @property
    def name(self) -> str:
        return self.block.name

    def add_maxima(self, buffer: Tensor, maxima: Tensor) -> None:
        """Raises the maxima of the tensor's blocks, float32 (`scale_shape`), to those of this part; infinite where a
        weight is not finite."""
        blocks = self._blocks(maxima)
        for at, matrices in self._matrices(buffer):
            own = self._tiles(matrices).abs().amax((-3, -1)).nan_to_num_(nan=math.inf, posinf=math.inf)
            torch.maximum(blocks[at], own, out=blocks[at])

    def values(self, buffer: Tensor, scales: Tensor) -> Tensor:
        """The part's values in FP8, dense."""
        values = torch.empty(self.block.box.shape, dtype=torch.float8_e4m3fn, device=buffer.device)
        stack, blocks = values.view(math.prod(values.shape[:-2]), *values.shape[-2:]), self._blocks(scales)
        for at, matrices in self._matrices(buffer):
            tiles = self._tiles(matrices) / blocks[at][:, :, None, :, None]
            stack[at].copy_(self._inside(tiles.clamp_(-LARGEST, LARGEST).flatten(-2).flatten(-3, -2)))
        return values

    def weights(self, values: Tensor, scales: Tensor) -> Tensor:
        """What the part's values and the tensor's scales stand for, float32."""
        spread = self._blocks(scales).repeat_interleave(BLOCK, -2).repeat_interleave(BLOCK, -1)
        return values.to(torch.float32) * self._inside(spread).reshape(values.shape)

    def view(self, buffer: Tensor) -> Tensor:
        """The part in the buffer; a copy if that is not contiguous."""
        flat = buffer.detach().reshape(-1)
        return flat.as_strided(self.block.box.shape, self.block.strides, flat.storage_offset() + self.block.offset)

    def _matrices(self, buffer: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """(which of the part's matrices, [n, rows, columns]): as many experts at once as `CHUNK` allows."""
        part = self.view(buffer)
        stack = part if part.dim() > 2 else part[None]
        size = max(1, CHUNK // max(1, stack.shape[1] * stack.shape[2]))
        for first in range(0, len(stack), size):
            yield slice(first, first + size), stack[first : first + size]

    def _tiles(self, matrices: Tensor) -> Tensor:
        """[n, block rows, 128, block columns, 128] float32, zeros around the part."""
        (top, left), (rows, columns) = self._margins, matrices.shape[-2:]
        padded = pad(matrices.to(torch.float32), (left, -(left + columns) % BLOCK, top, -(top + rows) % BLOCK))
        return padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))

    def _inside(self, padded: Tensor) -> Tensor:
        """The part without what `_tiles` adds around it."""
        (top, left), (rows, columns) = self._margins, self.block.box.shape[-2:]
        return padded[..., top : top + rows, left : left + columns]

    @property
    def _margins(self) -> tuple[int, int]:
        """Rows and columns of its first block before the part."""
        return self.block.box.start[-2] % BLOCK, self.block.box.start[-1] % BLOCK

    def _blocks(self, of_tensor: Tensor) -> Tensor:
        """[n, block rows, block columns]: the numbers of the blocks that the part touches, of those of the tensor."""
        box, stack = self.block.box, of_tensor if of_tensor.dim() > 2 else of_tensor[None]
        matrices = slice(box.start[0], box.start[0] + box.shape[0]) if len(box.shape) > 2 else slice(None)
        sizes = zip(box.start[-2:], box.shape[-2:], strict=True)
        rows, columns = (slice(first // BLOCK, -(-(first + size) // BLOCK)) for first, size in sizes)
        return stack[matrices, rows, columns]


def _scales_of(maxima: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The scales of tensors by their largest weights. Raises: NonFiniteWeightError."""
    names = [name for name, one in maxima.items() if one.numel()]
    if names:  # a single wait for the device
        largest = torch.stack([maxima[name].amax() for name in names]).tolist()
        for name, weight in zip(names, largest, strict=True):
            if not math.isfinite(weight):
                raise NonFiniteWeightError(name)
    return {name: torch.where(one > 0, (one / LARGEST).clamp_min_(SMALLEST_SCALE), 1.0) for name, one in maxima.items()}
