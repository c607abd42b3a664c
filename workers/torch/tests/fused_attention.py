"""Ascend's fused attention as its documentation has it, on the processor: part of `fake_npu.py`, and tested by itself."""

from __future__ import annotations

import torch


def npu_fusion_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    head_num: int,
    input_layout: str,
    atten_mask: torch.Tensor,
    scale: float,
    pre_tockens: int,
    next_tockens: int,
    sparse_mode: int,
    actual_seq_qlen: list[int],
    actual_seq_kvlen: list[int],
) -> tuple[torch.Tensor, ...]:
    """The fused attention as its documentation has it, for the arguments that the worker gives: `TND`, modes 3 and 4."""
    if input_layout != "TND" or query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError(f"layout {input_layout} of {query.dtype} is not supported")
    if query.shape[1] != head_num or sparse_mode not in (3, 4) or next_tockens != 0 or atten_mask.shape != (2048, 2048):
        raise RuntimeError("arguments that do not go together")
    if actual_seq_qlen != actual_seq_kvlen or actual_seq_qlen[-1] != len(query):
        raise RuntimeError("the sums of lengths do not fit the tokens")
    groups = head_num // key.shape[1]
    found, start = [], 0
    for end in actual_seq_qlen:
        q, k, v = (x[start:end].transpose(0, 1).float() for x in (query, key, value))
        k, v = k.repeat_interleave(groups, dim=0), v.repeat_interleave(groups, dim=0)
        place = torch.arange(end - start)
        distance = place[:, None] - place
        # A band counts from the diagonal: `pre_tockens` before it may be seen.
        seen = (distance >= 0) & (distance <= (pre_tockens if sparse_mode == 4 else end))
        scores = (q @ k.transpose(1, 2) * scale).masked_fill(~seen.to(q.device), float("-inf"))
        found.append((scores.softmax(dim=-1) @ v).transpose(0, 1).to(query.dtype))
        start = end
    return (torch.cat(found), None, None, None)  # type: ignore[return-value]
