"""Frozen linear layers in 4 bits, by bitsandbytes: quantised one by one as they are read, widened where they are multiplied.

Imported where a job asks for it alone: bitsandbytes need not be there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from pathlib import Path
from typing import Any, cast

import bitsandbytes
import torch
from bitsandbytes.functional import dequantize_4bit, get_4bit_type
from bitsandbytes.nn import Linear4bit, Params4bit
from transformers import PretrainedConfig, PreTrainedModel

from .failure import JobFailure
from .job import QuantizeSettings
from .model import frozen, load_base, without_weights
from .weights import WeightFiles


def load_quantized(
    folder: Path,
    config: PretrainedConfig,
    dtype: torch.dtype,
    attention: str | None,
    settings: QuantizeSettings,
    device: torch.device,
) -> PreTrainedModel:
    """Loads the model on the processor, every weight frozen, its linear layers in 4 bits on the device.

    A weight is quantised from the values of its file, whatever is computed in, and widened to the dtype that it has there.
    """
    if device.type == "cpu":
        _mend_the_cpu()
    model = without_weights(folder, config, dtype, attention)
    # A checkpoint that transformers makes other tensors of is loaded as a whole.
    files = None if isinstance(model, str) else WeightFiles(folder, model)
    model = load_base(folder, config, "auto", attention) if isinstance(model, str) else model
    covered = list(_covered(model, settings.skip_modules))
    if not covered:
        message = "the model has no linear layer that could be quantised"
        raise JobFailure("bad_parameters", message, "leave `quantize` out, or name fewer layers in `skip_modules`")
    for path, linear in covered:
        weight = linear.weight.data if files is None else files.read_whole(f"{path}.weight")
        _replace(model, path, _quantized(linear, weight, dtype, settings, device))
    _fill(model, dtype, files)
    # Where PEFT looks.
    cast(Any, model).is_loaded_in_4bit = True
    return frozen(model)


def load_stored(
    folder: Path, config: PretrainedConfig, dtype: torch.dtype, attention: str | None, device: torch.device
) -> PreTrainedModel:
    """Loads a model whose linear layers bitsandbytes has stored in 4 bits, on the device, every weight frozen."""
    if device.type == "cpu":
        _mend_the_cpu()
    model = load_base(folder, config, dtype, attention, device)
    for module in model.modules():
        if type(module) is Linear4bit:
            module.__class__ = Linear4Bits
            cast(Any, module).compute_dtype = dtype
    # transformers leaves the rest in the dtype of the file.
    _fill(model, dtype, None)
    return frozen(model)


def widen(model: PreTrainedModel) -> list[str]:
    """Puts the values of the layers in 4 bits in their place, in the dtype that is computed in; the paths of these layers."""
    layers = [(path, module) for path, module in model.named_modules() if isinstance(module, Linear4Bits)]
    for path, layer in layers:
        dense = torch.nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, device="meta")
        widened = dequantize_4bit(layer.weight, layer.weight.quant_state)
        dense.weight = torch.nn.Parameter(widened.to(layer.compute_dtype), requires_grad=False)
        dense.bias = layer.bias
        _replace(model, path, dense)
    # PEFT takes it for what it now is.
    cast(Any, model).is_loaded_in_4bit = False
    return [path for path, _ in layers]


def _covered(model: PreTrainedModel, skip_modules: Sequence[str]) -> Iterator[tuple[str, torch.nn.Linear]]:
    """Linear layers by their paths, but those that are skipped, and a head that is the embeddings once more."""
    embeddings = model.get_input_embeddings()
    skipped = [module.split(".") for module in skip_modules]
    for path, module in model.named_modules():
        if type(module) is not torch.nn.Linear or module.weight is cast(Any, embeddings).weight:
            continue
        parts = path.split(".")
        if not any(parts[start : start + len(s)] == s for s in skipped for start in range(len(parts))):
            yield path, module


def _quantized(
    linear: torch.nn.Linear, weight: torch.Tensor, dtype: torch.dtype, settings: QuantizeSettings, device: torch.device
) -> Linear4Bits:
    """The layer with its weight in 4 bits, on the device."""
    quantized = Linear4Bits(
        linear.in_features,
        linear.out_features,
        linear.bias is not None,
        compute_dtype=dtype,
        device=torch.device("meta"),
    )
    parameter = Params4bit(
        weight,
        requires_grad=False,
        blocksize=settings.block_size,
        compress_statistics=settings.double_quantization,
        quant_type=settings.base,
        module=quantized,
    )
    try:
        quantized.weight = parameter.to(device)
    except Exception as error:
        named = f"`{settings.base}` in blocks of {settings.block_size}"
        raise JobFailure("bad_parameters", f"bitsandbytes cannot quantise to {named} on {device.type}") from error
    quantized.bias = linear.bias
    return quantized


def _replace(model: PreTrainedModel, path: str, module: torch.nn.Module) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def _fill(model: PreTrainedModel, dtype: torch.dtype, files: WeightFiles | None) -> None:
    """Reads what is still without values, and has all that is not quantised in the dtype that is computed in."""
    # A tied weight is one parameter under several names, and stays one.
    filled: dict[int, torch.nn.Parameter] = {}
    for name, parameter in list(model.named_parameters(remove_duplicate=False)):
        if isinstance(parameter, Params4bit):
            continue
        if id(parameter) not in filled:
            if parameter.is_meta:
                assert files is not None, "a model that is loaded as a whole has all its values"
                value = files.read_whole(name).to(dtype, copy=True)
            else:
                value = parameter.data.to(dtype)
            filled[id(parameter)] = torch.nn.Parameter(value, requires_grad=False)
        path, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(path), leaf, filled[id(parameter)])
    for name, buffer in model.named_buffers():
        if files is not None and name in files:
            buffer.data = files.read_whole(name).to(buffer.dtype)


class Linear4Bits(Linear4bit):  # type: ignore[misc]
    """bitsandbytes' layer with two things mended.

    That one casts a bias for good, also one that is trained; and since version 0.49 it widens weights to the dtype that is computed
    in, also where the one that they were quantised from is narrower: then they are other numbers.
    """

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The product in the dtype that is computed in."""
        x = x.to(self.compute_dtype)
        state = self.weight.quant_state
        if state.dtype in (torch.float32, self.compute_dtype):
            product: torch.Tensor = bitsandbytes.matmul_4bit(x, self.weight, quant_state=state)
        else:
            product = cast(Any, _Widened).apply(x, self.weight)
        return product if self.bias is None else product + self.bias.to(product.dtype)


class _Widened(torch.autograd.Function):
    """A product with a frozen weight that is widened on the way, forward and backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: Any) -> torch.Tensor:
        ctx.weight = weight
        return torch.nn.functional.linear(x, dequantize_4bit(weight, weight.quant_state).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (gradient,) = gradients
        widened = dequantize_4bit(ctx.weight, ctx.weight.quant_state).to(gradient.dtype)
        return gradient @ widened, None


_MENDED: list[torch.library.Library] = []


def _mend_the_cpu() -> None:
    """Puts plain torch in the place of two of bitsandbytes' kernels for processors (seen in 0.50).

    The one that widens takes other blocks' magnitudes where rows are no whole number of blocks; the one that quantises magnitudes
    finds their codes in a table of limited resolution.
    """
    if _MENDED:
        return
    library = torch.library.Library("bitsandbytes", "IMPL")
    library.impl("dequantize_4bit", _dequantized, "CPU", allow_override=True)
    library.impl("quantize_blockwise", _quantized_blocks, "CPU", allow_override=True)
    _MENDED.append(library)


def _dequantized(
    packed: torch.Tensor, absmax: torch.Tensor, block_size: int, base: str, shape: Sequence[int], dtype: torch.dtype
) -> torch.Tensor:
    packed, count = packed.view(torch.uint8).reshape(-1), prod(shape)
    codes = torch.stack([packed >> 4, packed & 15], 1).flatten()[:count].long()
    scales = absmax.float().repeat_interleave(block_size)[:count]
    levels: torch.Tensor = get_4bit_type(base, device="cpu")
    return (levels[codes] * scales).reshape(shape).to(dtype)


def _quantized_blocks(values: torch.Tensor, levels: torch.Tensor, block_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The nearest level of each value, the lower of two, and the greatest magnitude of each block."""
    blocks = values.float().flatten().split(block_size)
    absmax = torch.stack([block.abs().max() for block in blocks])
    between = (levels[:-1] + levels[1:]) / 2
    scaled = [block * (1 / largest) for block, largest in zip(blocks, absmax, strict=True)]
    codes = torch.bucketize(torch.nan_to_num(torch.cat(scaled)), between)
    codes[(absmax == 0).repeat_interleave(block_size)[: len(codes)]] = 0
    return codes.to(torch.uint8).reshape(values.shape), absmax
