"""Rotation of queries and keys by position, and the write into the cache, straight from the joined projection.

Shape suffixes as in base.py; W = (H + 2G) * D, the width of the joined projection; E = heads of a program; C = D / 2.
"""

import torch
import triton
import triton.language as tl

from mpi_tp.kernels.base import AttentionHeads, AttentionInputs, Cache
from mpi_tp.kernels.gpu.dependency import launch_options, let_next_start, wait_for_inputs

HEADS = 8
"""Heads of a program."""


@triton.jit
def _normalise(a_EC, b_EC, scale_E, weight_EC, up_weight_EC, DTYPE: tl.constexpr):
    """Scale both halves of heads and weigh them, rounded where Hugging Face's models round."""
    a_EC = (a_EC * scale_E[:, None]).to(DTYPE).to(tl.float32) * weight_EC.to(tl.float32)
    b_EC = (b_EC * scale_E[:, None]).to(DTYPE).to(tl.float32) * up_weight_EC.to(tl.float32)
    return a_EC.to(DTYPE).to(tl.float32), b_EC.to(DTYPE).to(tl.float32)


@triton.jit
def _rotate_and_store_kernel(
    qkv, q_norm, k_norm, cos, sin, slots, q, keys, values, H, G, block_stride,
    S: tl.constexpr, HALF: tl.constexpr, HALF_PADDED: tl.constexpr, HEADS: tl.constexpr, EPS: tl.constexpr,
    NORMED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Take HEADS heads of one token: query heads come first, then key heads, then value heads."""
    let_next_start(PDL)
    wait_for_inputs(PDL)
    DTYPE: tl.constexpr = q.dtype.element_ty
    D: tl.constexpr = 2 * HALF
    token = tl.program_id(0).to(tl.int64)
    head_E = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    half_C = tl.arange(0, HALF_PADDED)
    in_half_C = half_C < HALF
    exists_EC = (head_E < H + 2 * G)[:, None] & in_half_C[None, :]
    is_query_EC = (head_E < H)[:, None] & in_half_C[None, :]
    is_key_EC = ((head_E >= H) & (head_E < H + G))[:, None] & in_half_C[None, :]
    is_value_EC = (head_E >= H + G)[:, None] & exists_EC
    place_EC = head_E[:, None] * D + half_C[None, :]
    x_EC = qkv + token * (H + 2 * G) * D + place_EC
    a_EC = tl.load(x_EC, mask=exists_EC, other=0.0).to(tl.float32)
    b_EC = tl.load(x_EC + HALF, mask=exists_EC, other=0.0).to(tl.float32)
    v_EC, up_v_EC = a_EC, b_EC
    if NORMED:
        scale_E = tl.rsqrt((tl.sum(a_EC * a_EC, 1) + tl.sum(b_EC * b_EC, 1)) / D + EPS)
        no_head_EC = head_E[:, None] * 0 + half_C[None, :]
        w_EC = tl.load(q_norm + no_head_EC, mask=is_query_EC, other=0.0)
        w_EC += tl.load(k_norm + no_head_EC, mask=is_key_EC, other=0.0)
        up_w_EC = tl.load(q_norm + HALF + no_head_EC, mask=is_query_EC, other=0.0)
        up_w_EC += tl.load(k_norm + HALF + no_head_EC, mask=is_key_EC, other=0.0)
        a_EC, b_EC = _normalise(a_EC, b_EC, scale_E, w_EC, up_w_EC, DTYPE)
    cos_C = tl.load(cos + token * D + half_C, mask=in_half_C, other=0.0)[None, :]
    sin_C = tl.load(sin + token * D + half_C, mask=in_half_C, other=0.0)[None, :]
    first_EC = (a_EC * cos_C - b_EC * sin_C).to(DTYPE)
    second_EC = (b_EC * cos_C + a_EC * sin_C).to(DTYPE)
    slot = tl.load(slots + token)
    stored = (slot // S) * block_stride + (slot % S) * D
    query_EC = q + token * H * D + place_EC
    tl.store(query_EC, first_EC, mask=is_query_EC)
    tl.store(query_EC + HALF, second_EC, mask=is_query_EC)
    key_EC = keys + stored + ((head_E - H) * S * D)[:, None] + half_C[None, :]
    tl.store(key_EC, first_EC, mask=is_key_EC)
    tl.store(key_EC + HALF, second_EC, mask=is_key_EC)
    value_EC = values + stored + ((head_E - H - G) * S * D)[:, None] + half_C[None, :]
    tl.store(value_EC, v_EC.to(DTYPE), mask=is_value_EC)
    tl.store(value_EC + HALF, up_v_EC.to(DTYPE), mask=is_value_EC)


def rotate_and_store(
    qkv_TW: torch.Tensor,
    heads: AttentionHeads,
    rotation: tuple[torch.Tensor, torch.Tensor],
    cache: Cache,
    inputs: AttentionInputs,
) -> torch.Tensor:
    """Return q [T, H, D], rotated; store k, rotated, and v in the cache, inside a block in the order [G, S, D]."""
    keys, values = cache
    q_THD = qkv_TW.new_empty(len(qkv_TW), heads.num_heads, heads.head_dim)
    normed = heads.q_norm is not None
    half = heads.head_dim // 2
    grid = (len(qkv_TW), triton.cdiv(heads.num_heads + 2 * heads.num_kv_heads, HEADS))
    if len(qkv_TW):
        _rotate_and_store_kernel[grid](
            qkv_TW, heads.q_norm if normed else qkv_TW, heads.k_norm if normed else qkv_TW, *rotation, inputs.slots,
            q_THD, keys, values, heads.num_heads, heads.num_kv_heads, keys.stride(0), S=keys.shape[1],
            HALF=half, HALF_PADDED=triton.next_power_of_2(half), HEADS=HEADS, EPS=heads.norm_eps, NORMED=normed,
            num_warps=4, enable_fp_fusion=False, **launch_options(),
        )  # fmt: skip
    return q_THD
