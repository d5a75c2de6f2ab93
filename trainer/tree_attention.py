"""TRL's tree attention without its CUDA kernel: the same varlen call on PyTorch's scaled dot-product attention.

TRL packs samples into a prefix tree and calls `flash_attn_varlen_func` once per layer, with one segment of queries per
tree segment and, for each, the keys of its path from the root. Here the segments are padded to one batch: rollouts are
short and many where there is no GPU, so one masked call beats a loop.
"""

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from trl.experimental.async_grpo import async_grpo_trainer, packing

__all__ = ["flash_attn_varlen_func", "install_where_needed"]


def flash_attn_varlen_func(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
) -> torch.Tensor:
    """Attention of each segment's queries to its own keys.

    Args:
        query: `(tokens_q, heads, head_dim)`; segment `s` is rows `cu_seqlens_q[s]` to `cu_seqlens_q[s + 1]`.
        key, value: `(tokens_k, kv_heads, head_dim)`, cut by `cu_seqlens_k`; `heads` is a multiple of `kv_heads`.
        causal: the last query of a segment sees all of its keys, the one before all but one, and so on.
        window_size: `(left, right)` keys around each query's own position that it sees; -1 is no bound.

    Returns `(tokens_q, heads, head_dim)`. Raises `NotImplementedError` for a softcap, which SDPA cannot apply.
    """
    if softcap:
        raise NotImplementedError("attention softcap needs the CUDA kernel: SDPA has no place for it")
    device = query.device
    lengths_q, lengths_k = cu_seqlens_q.diff().to(device), cu_seqlens_k.diff().to(device)
    index_q = torch.arange(max_seqlen_q, device=device)
    index_k = torch.arange(max_seqlen_k, device=device)
    real_q = index_q < lengths_q[:, None]  # (segments, max_q)
    real_k = index_k < lengths_k[:, None]

    # Bottom-right aligned: query i of a segment stands at key position i + (keys - queries).
    position = (index_q + (lengths_k - lengths_q)[:, None])[:, :, None]  # (segments, max_q, 1)
    visible = real_k[:, None, :].expand(-1, max_seqlen_q, -1)
    if causal:
        visible = visible & (index_k <= position)
    left, right = window_size
    if left >= 0:
        visible = visible & (index_k >= position - left)
    if right >= 0:
        visible = visible & (index_k <= position + right)
    # A padding query sees nothing, which would be NaN in the softmax and in its gradient: let it see the first key.
    visible = visible | (~real_q[:, :, None] & (index_k == 0))

    out = scaled_dot_product_attention(
        _pad(query, real_q),
        _pad(key, real_k),
        _pad(value, real_k),
        attn_mask=visible[:, None],
        scale=softmax_scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2)[real_q]


def _pad(rows: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """`(tokens, heads, dim)` → `(segments, heads, max_len, dim)`, zero where `real` (segments, max_len) is false."""
    padded = rows.new_zeros(*real.shape, *rows.shape[1:])
    padded[real] = rows
    return padded.transpose(1, 2)


def install_where_needed() -> bool:
    """Put this in place of TRL's CUDA kernel if there is no GPU; whether it was put in place."""
    if torch.cuda.is_available():
        return False
    kernel: Any = SimpleNamespace(flash_attn_varlen_func=flash_attn_varlen_func)
    packing._flash_attn = lambda: kernel
    # Asks CUDA for the device's name; None leaves the MFU metrics out.
    async_grpo_trainer.get_peak_flops_per_device = lambda *_args: None
    return True
