"""rlinf's stand-in for sgl_kernel (sglang-kernel 0.4.10) on CPUs without a build of it.

SGLang imports these names on any CPU but does not call them in rlinf's use: without AMX, every layer and the
request-to-token bookkeeping use plain PyTorch. The names are those that SGLang 0.5.23 imports while it serves Qwen2,
Qwen3 and Qwen3-MoE models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import torch

__version__ = "0.4.10+rlinf.standin"

if torch.version.cuda is not None or torch.version.hip is not None:
    raise ImportError("this sgl_kernel is rlinf's stand-in for CPUs; for a torch with GPUs install sglang-kernel")


def _missing(name: str) -> Callable[..., NoReturn]:
    def kernel(*_: Any, **__: Any) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name}: this is rlinf's stand-in for CPUs, which has no kernels")

    kernel.__name__ = name
    return kernel


copy_all_layer_kv_cache_cpu = _missing("copy_all_layer_kv_cache_cpu")
assign_req_to_token_pool_cpu = _missing("assign_req_to_token_pool_cpu")
assign_extend_cache_locs_cpu = _missing("assign_extend_cache_locs_cpu")
assign_draft_cache_locs_contiguous_cpu = _missing("assign_draft_cache_locs_contiguous_cpu")
build_tree_kernel_efficient_cpu = _missing("build_tree_kernel_efficient_cpu")
fill_accept_out_cache_loc_cpu = _missing("fill_accept_out_cache_loc_cpu")
fill_bonus_tokens_cpu = _missing("fill_bonus_tokens_cpu")
verify_tree_greedy_cpu = _missing("verify_tree_greedy_cpu")
