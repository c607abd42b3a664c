"""The product of a linear layer and of the adapter on it, as one operation of autograd in place of PEFT's chain.

A step may be bound by how fast the processor can hand operations to a GPU (`benches/torch_host.py`). PEFT also has
the layer's input in f32, and back in the type that is computed in; here it is read as it is.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F  # noqa: N812 - torch's own name for it

if TYPE_CHECKING:
    from peft.tuners.lora import LoraLayer

ADAPTER = "default"


class LoraProduct(torch.autograd.Function):
    """`x·Wᵀ + bias + scaling · (d·Aᵀ)·Bᵀ` with `d` the input after dropout, in a type that the products are computed in."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        dropped: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        a: torch.Tensor,
        b: torch.Tensor,
        scaling: float,
        dtype: torch.dtype,
    ) -> torch.Tensor:
        """`x` and `dropped`, where it is another, are `(…, in)`, `a` is `(rank, in)` and `b` `(out, rank)`."""
        rows = x.reshape(-1, x.shape[-1]).to(dtype)
        adapted = rows if dropped is None else dropped.reshape(rows.shape).to(dtype)
        y = F.linear(rows, weight.to(dtype), None if bias is None else bias.to(dtype))
        a_computed, b_computed = a.to(dtype), b.to(dtype)
        inner = adapted.mm(a_computed.t())
        y.addmm_(inner, b_computed.t(), alpha=scaling)
        ctx.save_for_backward(adapted, weight, a_computed, b_computed, inner)
        ctx.scaling, ctx.has_dropout = scaling, dropped is not None
        ctx.shape, ctx.dtype_of_input, ctx.dtype_of_adapter = x.shape, x.dtype, a.dtype
        return y.view(*x.shape[:-1], y.shape[-1])

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of the input, the input after dropout, `a` and `b`."""
        adapted, weight, a, b, inner = ctx.saved_tensors
        dy = dy.reshape(-1, dy.shape[-1]).to(a.dtype)
        d_inner, d_a, d_b = _of_factors(dy, adapted, b, inner, ctx.scaling)
        d_x = d_dropped = None
        if ctx.needs_input_grad[0]:
            d_x = dy.mm(weight.to(a.dtype))
            if not ctx.has_dropout:
                d_x.addmm_(d_inner, a)
            d_x = d_x.to(ctx.dtype_of_input).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            d_dropped = d_inner.mm(a).to(ctx.dtype_of_input).view(ctx.shape)
        return d_x, d_dropped, None, None, d_a.to(ctx.dtype_of_adapter), d_b.to(ctx.dtype_of_adapter), None, None


class LoraTerm(torch.autograd.Function):
    """`y + scaling · (d·Aᵀ)·Bᵀ` with `d` the layer's input after dropout, in the type of `y`: for layers of another kind."""

    @staticmethod
    def forward(
        ctx: Any, y: torch.Tensor, dropped: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """`y` is `(…, out)`, `dropped` `(…, in)`, `a` is `(rank, in)` and `b` `(out, rank)`."""
        rows = dropped.reshape(-1, dropped.shape[-1]).to(y.dtype)
        a_computed, b_computed = a.to(y.dtype), b.to(y.dtype)
        inner = rows.mm(a_computed.t())
        ctx.save_for_backward(rows, a_computed, b_computed, inner)
        ctx.scaling, ctx.shape, ctx.dtype_of_input, ctx.dtype_of_adapter = (
            scaling,
            dropped.shape,
            dropped.dtype,
            a.dtype,
        )
        found = torch.addmm(y.reshape(-1, y.shape[-1]), inner, b_computed.t(), alpha=scaling)
        return found.view(y.shape)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of `y`, the input after dropout, `a` and `b`."""
        rows, a, b, inner = ctx.saved_tensors
        d_rows = None
        d_inner, d_a, d_b = _of_factors(dy.reshape(-1, dy.shape[-1]), rows, b, inner, ctx.scaling)
        if ctx.needs_input_grad[1]:
            d_rows = d_inner.mm(a).to(ctx.dtype_of_input).view(ctx.shape)
        return dy, d_rows, d_a.to(ctx.dtype_of_adapter), d_b.to(ctx.dtype_of_adapter), None


def _of_factors(
    dy: torch.Tensor, rows: torch.Tensor, b: torch.Tensor, inner: torch.Tensor, scaling: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of `inner`, which is `rows·Aᵀ`, of A and of B."""
    # With `beta` 0 only the shape of the first argument counts.
    d_inner = torch.addmm(inner, dy, b, beta=0, alpha=scaling)
    return d_inner, d_inner.t().mm(rows), torch.addmm(b, dy.t(), inner, beta=0, alpha=scaling)


def fuse(layer: LoraLayer) -> bool:
    """Has a layer of PEFT's compute as one operation; whether that is known: LoRA on a frozen linear layer, or on one in 4 bits."""
    from peft.tuners.lora.layer import Linear

    base, module = layer.get_base_layer(), cast(Any, layer)
    is_plain = type(layer) is Linear and type(base) is torch.nn.Linear
    # Without bitsandbytes PEFT has no such class.
    in_4_bits = type(layer).__module__ == "peft.tuners.lora.bnb" and type(layer).__name__ == "Linear4bit"
    is_known = (
        (is_plain or in_4_bits)
        and list(layer.lora_A) == [ADAPTER]
        and not layer.lora_variant
        and layer.lora_A[ADAPTER].bias is None
        and layer.lora_B[ADAPTER].bias is None
        and not any(parameter.requires_grad for parameter in base.parameters())
    )
    if is_known:
        fused = _with_weight if is_plain else _with_layer
        module.forward = functools.partial(_forward, fused, layer, base, module.forward)
    return is_known


def _forward(fused: Any, layer: Any, base: Any, plain: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if layer.disable_adapters or layer.merged or args or kwargs:
        found: torch.Tensor = plain(x, *args, **kwargs)
    else:
        a, b = layer.lora_A[ADAPTER].weight, layer.lora_B[ADAPTER].weight
        found = fused(base, x, layer.lora_dropout[ADAPTER](x), a, b, layer.scaling[ADAPTER])
    return found


def _with_weight(
    base: Any, x: torch.Tensor, dropped: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float
) -> torch.Tensor:
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    other = None if dropped is x else dropped
    found: torch.Tensor = LoraProduct.apply(x, other, base.weight, base.bias, a, b, scaling, dtype)
    return found


def _with_layer(
    base: Any, x: torch.Tensor, dropped: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float
) -> torch.Tensor:
    found: torch.Tensor = LoraTerm.apply(base(x), dropped, a, b, scaling)
    return found
