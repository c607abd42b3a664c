"""What is computed in another way than PEFT's or torch's own: an adapter's product, a layer's backward, masks of dropout."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint

from pipeline_torch_worker.adapter import lora_layers
from pipeline_torch_worker.draws import AddressedDropout, Draws, Places, mask
from pipeline_torch_worker.model import NestedBackward
from pipeline_torch_worker.products import LoraTerm, fuse
from support import takes_minutes


def adapted_layers(**settings: Any) -> tuple[Any, Any]:
    """A linear layer with PEFT's adapter on it, and the same fused."""
    torch.manual_seed(0)

    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = torch.nn.Linear(24, 40)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.linear(x)
            return found

    config = LoraConfig(r=4, lora_alpha=6, target_modules=["linear"], init_lora_weights=False, **settings)
    plain = get_peft_model(Model(), config)
    plain.eval()
    fused = copy.deepcopy(plain)
    ((_, layer),) = lora_layers(fused)
    assert fuse(layer) == (not settings)
    return plain, fused


def gradients(model: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """The output, and the gradients of the input and of what is trained."""
    x = x.clone().requires_grad_()
    found = model(x)
    (found * torch.linspace(-1, 1, found.numel()).view_as(found)).sum().backward()
    trained = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    assert all(gradient is not None for gradient in trained)
    return [found, x.grad, *trained]


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_an_adapters_product_is_pefts(dropout: float) -> None:
    plain, fused = adapted_layers()
    x = torch.randn(2, 9, 24)
    for model in (plain, fused):
        ((_, layer),) = lora_layers(model)
        draws = Draws(seed=1)
        # 18 tokens in one sequence.
        draws.places = Places(torch.zeros(18, dtype=torch.int64), torch.arange(18))
        layer.lora_dropout["default"] = AddressedDropout(draws, "linear", dropout) if dropout else torch.nn.Identity()
        layer.lora_dropout.train()
    for expected, found in zip(gradients(plain, x.view(1, 18, 24)), gradients(fused, x.view(1, 18, 24)), strict=True):
        torch.testing.assert_close(found, expected)


def test_an_adapters_term_is_pefts() -> None:
    plain, fused = adapted_layers()
    layer: Any
    ((_, layer),) = lora_layers(fused)
    layer.forward = functools.partial(_with_layer_of, layer)
    x = torch.randn(2, 9, 24)
    for expected, found in zip(gradients(plain, x), gradients(fused, x), strict=True):
        torch.testing.assert_close(found, expected)


def _with_layer_of(layer: Any, x: torch.Tensor) -> torch.Tensor:
    """The layer as one in 4 bits is computed: its base by itself, and the adapter's term."""
    a, b = (factor["default"].weight for factor in (layer.lora_A, layer.lora_B))
    found: torch.Tensor = LoraTerm.apply(layer.get_base_layer()(x), x, a, b, layer.scaling["default"])
    return found


def test_an_adapters_product_in_bf16_is_nearer_to_that_in_f32_than_pefts() -> None:
    plain, fused = adapted_layers()
    x = torch.randn(64, 24)
    exact = gradients(plain, x)
    plain.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        pefts, ours = gradients(plain, x), gradients(fused, x)
    assert [value.dtype for value in ours] == [value.dtype for value in pefts]
    for expected, found, other in zip(exact, ours, pefts, strict=True):
        error = (found.float() - expected).norm()
        assert error <= 1.05 * (other.float() - expected).norm()
        assert error <= 0.01 * expected.norm()


def test_without_its_adapter_or_with_it_merged_a_layer_is_pefts() -> None:
    plain, fused = adapted_layers()
    x = torch.randn(3, 24)
    base, adapted = plain.get_base_model().linear.base_layer(x), plain(x)
    with fused.disable_adapter():
        assert torch.equal(fused(x), base)
    assert not torch.equal(fused(x), base)
    fused.merge_adapter()
    torch.testing.assert_close(fused(x), adapted)
    fused.unmerge_adapter()
    torch.testing.assert_close(fused(x), adapted)


@pytest.mark.parametrize("settings", [{"use_dora": True}, {"lora_bias": True}, {"bias": "all"}])
def test_other_adapters_stay_pefts(settings: dict[str, Any]) -> None:
    plain, fused = adapted_layers(**settings)
    x = torch.randn(3, 24)
    for expected, found in zip(gradients(plain, x), gradients(fused, x), strict=True):
        assert torch.equal(found, expected)


def test_a_nested_backward_has_the_gradients_of_one() -> None:
    torch.manual_seed(0)
    layers = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)])
    start = torch.randn(5, 8)

    def run(step: Any) -> list[torch.Tensor]:
        layers.zero_grad(set_to_none=True)
        hidden = start.clone().requires_grad_()
        x = hidden
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in layers:
                x = step(layer, x)
        x.float().square().sum().backward()
        found = [hidden.grad, *(parameter.grad for parameter in layers.parameters())]
        assert all(gradient is not None for gradient in found)
        return found  # type: ignore[return-value]

    def of_layer(layer: Any, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = torch.tanh(layer(x))
        return found

    expected = run(of_layer)
    nested = run(lambda layer, x: NestedBackward.apply(lambda x: of_layer(layer, x), x))
    of_torch = run(lambda layer, x: checkpoint(of_layer, layer, x, use_reentrant=False))
    in_tuples = run(lambda layer, x: NestedBackward.apply(lambda x: (of_layer(layer, x), None, x.detach()), x)[0])
    for found in (nested, of_torch, in_tuples):
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_masks_depend_on_the_address_alone() -> None:
    draws = Draws(seed=3)
    modules = [AddressedDropout(draws, name, 0.25) for name in ("q_proj", "v_proj")]
    rows, tokens = torch.tensor([2**40, 7, 7, 7]), torch.tensor([0, 0, 1, 2])

    def kept(module: AddressedDropout, which: slice, columns: int = 400) -> torch.Tensor:
        with draws.at(Places(rows[which], tokens[which])):
            found: torch.Tensor = module(torch.ones(1, len(rows[which]), columns))
        assert set(found.unique().tolist()) == {0.0, torch.tensor(1 / 0.75).item()}
        return found[0] != 0

    draws.step = 1
    whole = kept(modules[0], slice(None))
    assert torch.equal(kept(modules[0], slice(2, 4)), whole[2:])
    assert abs(whole.float().mean() - 0.75) < 0.03
    assert not torch.equal(kept(modules[1], slice(None)), whole)
    draws.step = 2
    assert not torch.equal(kept(modules[0], slice(None)), whole)


@takes_minutes
def test_compiled_masks_are_the_same() -> None:
    draws = Draws(seed=3)
    draws.modules.append(-5)
    places = Places(torch.tensor([2**40, 7, 7, 7]), torch.tensor([0, 0, 1, 2**33]))
    compiled = torch.compile(mask, dynamic=True)
    for columns in (10, 64, 129):
        streams = places.streams(draws, 0)
        plain = mask(streams, places.tokens, columns, 2**30)
        assert torch.equal(compiled(streams, places.tokens, columns, 2**30), plain)
