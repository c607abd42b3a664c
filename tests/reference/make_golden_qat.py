"""Writes tests/golden/qat/linear.safetensors: fake-quantised linear layers of torchao, forward and backward.

    pip install torch torchao safetensors && python tests/reference/make_golden_qat.py tests/golden/qat/linear.safetensors

The layers are those of `Int8DynActInt4WeightQATQuantizer`, which torchtune's recipes for quantisation-aware training name: 8-bit
activations with a scale and a zero point per token, 4-bit weights with a scale per group of inputs. Each case `<case>` has `.x`, `.weight`
and `.dy`, the layer's `.y`, the fake-quantised `.x_fake` and `.weight_fake`, the f32 `.scales`, and the gradients `.dx` and `.dweight`.
`.steps.0` to `.steps.2` are the weights after steps of SGD. The metadata has versions, group sizes and the learning rate.

torch 2.14 changed the gradient of `clamp` at the very ends of its range from 1 to 0 (pytorch issue 195931). The cases have the 1 that
torchtune's recipes were trained with: with the 0, all weights that the last two of 16 numbers stand for would be frozen.
"""

import json
import sys

import torch
import torchao
from safetensors.torch import save_file
from torchao.quantization.qat import Int8DynActInt4WeightQATQuantizer

RATE = 0.05


class Clamp(torch.autograd.Function):
    """`torch.clamp` with its gradient until torch 2.13."""

    @staticmethod
    def forward(context, x, least, most):
        context.save_for_backward((x >= least) & (x <= most))
        return torch.minimum(
            torch.maximum(x, torch.tensor(float(least))), torch.tensor(float(most))
        )

    @staticmethod
    def backward(context, gradient):
        (passes,) = context.saved_tensors
        return gradient * passes, None, None


clamp = torch.clamp


def clamp_until_2_13(x, min=None, max=None):
    return (
        clamp(x, min, max) if min is None or max is None else Clamp.apply(x, min, max)
    )


def numbers(seed, rows, columns, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn((rows, columns), generator=generator) * scale


def layer(weight, group_size):
    linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data.copy_(weight)
    quantizer = Int8DynActInt4WeightQATQuantizer(groupsize=group_size)
    return quantizer.prepare(torch.nn.Sequential(linear))[0]


def case(name, x, weight, group_size, out):
    fake = layer(weight, group_size)
    x = x.clone().requires_grad_()
    dy = numbers(9, x.shape[0], weight.shape[0])
    y = fake(x)
    y.backward(dy)
    out |= {f"{name}.x": x, f"{name}.weight": weight, f"{name}.dy": dy, f"{name}.y": y}
    out |= {f"{name}.dx": x.grad, f"{name}.dweight": fake.weight.grad}
    out[f"{name}.x_fake"] = fake.activation_fake_quantizer(x)
    out[f"{name}.weight_fake"] = fake.weight_fake_quantizer(fake.weight)
    out[f"{name}.scales"] = fake.weight_fake_quantizer.scale
    fake.zero_grad()
    optimizer = torch.optim.SGD(fake.parameters(), lr=RATE)
    for step in range(3):
        optimizer.zero_grad()
        fake(x.detach()).backward(dy)
        optimizer.step()
        out[f"{name}.steps.{step}"] = fake.weight.clone()
    return group_size


def main():
    torch.clamp = clamp_until_2_13
    out, groups = {}, {}
    plain = numbers(0, 5, 64)
    groups["plain"] = case("plain", plain, numbers(1, 24, 64, 0.1), 32, out)
    groups["one_group"] = case(
        "one_group", numbers(2, 3, 256), numbers(3, 8, 256, 0.02), 256, out
    )
    # Tokens that have one sign only, are constant, zero or nearly so; rows of weights that are, and of one large value.
    odd = plain.clone()
    odd[0], odd[1], odd[2] = odd[0].abs() + 1, -odd[1].abs() - 1, 0.0
    odd[3], odd[4, 0] = 0.25, 1000.0
    weight = numbers(4, 6, 64, 0.1)
    weight[0], weight[1], weight[2] = 0.0, 0.5, -0.5
    weight[3, 5], weight[4] = 30.0, weight[4] * 1e-30
    groups["odd"] = case("odd", odd, weight, 16, out)
    out = {key: value.detach().contiguous().clone() for key, value in out.items()}
    metadata = {
        "torch": torch.__version__,
        "torchao": torchao.__version__,
        "rate": str(RATE),
        "groups": json.dumps(groups),
    }
    save_file(out, sys.argv[1], metadata)


main()
