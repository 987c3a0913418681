"""Stands in for SGLang's compiled kernels, which are not on PyPI for machines without a GPU.

With ``--device cpu`` SGLang 0.5.23 imports ten of them by name. All serve speculative decoding, which this setup does
not do; they are here to be imported, and fail by name if they are called. Everything else SGLang computes in plain
torch where it finds no kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn


def _absent(name: str) -> Callable[..., NoReturn]:
    def kernel(*args: object, **kwargs: object) -> NoReturn:
        raise NotImplementedError(f"sgl_kernel.{name} has no build for this machine: run without speculative decoding")

    return kernel


for _name in (
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "rotate_input_ids_cpu",
    "verify_tree_greedy_cpu",
):
    globals()[_name] = _absent(_name)
