"""Casts as torch makes them, element by element, whatever instructions torch was told to use."""

import torch


def cast_by_torch(values: torch.Tensor, to: torch.dtype) -> torch.Tensor:
    """`values` in dtype `to`, by torch's code for strided tensors.

    What NaN becomes in float16 depends on how that code was built; here it is what the processor's own instruction
    makes of it (VCVTPS2PH): the sign, the upper bits, and quiet.
    """
    twice = values.flatten().repeat(2)  # a single element would not be strided
    strided = torch.stack([twice, twice], 1)[:, 0].to(to)[: values.numel()]
    result = torch.empty(values.shape, dtype=to).copy_(strided.reshape(values.shape))
    if to != torch.float16 or values.dtype not in (torch.float32, torch.bfloat16):
        return result
    narrow = values.contiguous().view(torch.int32 if values.dtype == torch.float32 else torch.int16).int()
    wide = narrow if values.dtype == torch.float32 else narrow << 16
    nan = (wide >> 16 & 0x8000) | 0x7E00 | (wide >> 13 & 0x3FF)
    return torch.where(values.isnan(), nan.to(torch.int16).view(torch.float16), result)
