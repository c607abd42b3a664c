"""The product of a linear layer and of the adapter on it, as one operation of autograd in place of PEFT's chain of fifteen.

A step is bound by how fast the processor can hand operations to a GPU, and most of them are those of adapters. PEFT also has the
layer's input in f32, and back in the type that is computed in; here it is read as it is.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

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
        scaling = ctx.scaling
        dy = dy.reshape(-1, dy.shape[-1]).to(a.dtype)
        # With `beta` 0 only the shape of the first argument counts.
        d_inner = torch.addmm(inner, dy, b, beta=0, alpha=scaling)
        d_b = torch.addmm(b, dy.t(), inner, beta=0, alpha=scaling).to(ctx.dtype_of_adapter)
        d_a = d_inner.t().mm(adapted).to(ctx.dtype_of_adapter)
        d_x = d_dropped = None
        if ctx.needs_input_grad[0]:
            d_x = dy.mm(weight.to(a.dtype))
            if not ctx.has_dropout:
                d_x.addmm_(d_inner, a)
            d_x = d_x.to(ctx.dtype_of_input).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            d_dropped = d_inner.mm(a).to(ctx.dtype_of_input).view(ctx.shape)
        return d_x, d_dropped, None, None, d_a, d_b, None, None


def fuse(layer: LoraLayer) -> bool:
    """Has a layer of PEFT's compute as one operation; whether that is known: LoRA on a linear layer that is not trained."""
    from peft.tuners.lora.layer import Linear

    base = layer.get_base_layer()
    is_known = (
        type(layer) is Linear
        and type(base) is torch.nn.Linear
        and list(layer.lora_A) == [ADAPTER]
        and not layer.lora_variant
        and layer.lora_A[ADAPTER].bias is None
        and layer.lora_B[ADAPTER].bias is None
        and not any(parameter.requires_grad for parameter in base.parameters())
    )
    if is_known:
        module: Any = layer
        module.forward = functools.partial(_forward, layer, base, module.forward)
    return is_known


def _forward(layer: Any, base: Any, plain: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    if layer.disable_adapters or layer.merged or args or kwargs:
        of_peft: torch.Tensor = plain(x, *args, **kwargs)
        return of_peft
    dropped = layer.lora_dropout[ADAPTER](x)
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    product: torch.Tensor = LoraProduct.apply(
        x,
        None if dropped is x else dropped,
        base.weight,
        base.bias,
        layer.lora_A[ADAPTER].weight,
        layer.lora_B[ADAPTER].weight,
        layer.scaling[ADAPTER],
        dtype,
    )
    return product
