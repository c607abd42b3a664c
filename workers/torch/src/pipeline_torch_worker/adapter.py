"""The adapter: PEFT's modules in the base model, their tensors by the names of its files, and the folder that is left."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import PreTrainedModel

from .draws import AddressedDropout, Draws
from .failure import JobFailure
from .products import fuse

# PEFT is imported where an adapter is there: that takes as long as all the rest, and not every job has one.
if TYPE_CHECKING:
    from peft import PeftModel
    from peft.tuners.lora import LoraLayer

WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."


def _import_peft() -> None:
    """Imports PEFT, without bitsandbytes for a model that does not need it.

    PEFT imports that wherever it is, and it torch's compiler, which takes seconds. What computes in 4 bits has it already.
    """
    if sys.modules.get("bitsandbytes") is None:
        # To Python, a module that is not there.
        sys.modules["bitsandbytes"] = None  # type: ignore[assignment]
        try:
            from peft import import_utils

            import_utils.is_bnb_available()
        finally:
            del sys.modules["bitsandbytes"]
    else:
        from peft import import_utils

        # It remembers whether it is there, perhaps from a model that did not need it.
        for remembered in (import_utils.is_bnb_available, import_utils.is_bnb_4bit_available):
            remembered.cache_clear()


def attach(model: PreTrainedModel, folder: Path, trained: bool) -> PeftModel:
    """Puts the adapter of a PEFT folder into the model; its values are f32 where they are trained."""
    _import_peft()
    from peft import PeftModel

    try:
        adapted = PeftModel.from_pretrained(model, str(folder), is_trainable=trained)
    except Exception as error:
        raise JobFailure("bad_parameters", f"PEFT cannot put the adapter in `{folder}` on the model") from error
    adapted.eval()
    if trained:
        _put_in_place(adapted, folder)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
        _check(adapted, folder)
    return adapted


def file_name(parameter: str) -> str:
    """The name in `adapter_model.safetensors` of a parameter of a `PeftModel`."""
    name = parameter.replace(".modules_to_save.default.", ".").replace(".default.", ".").removesuffix(".default")
    # The magnitudes of DoRA are a module in memory and a tensor in the file.
    return name.removesuffix(".weight") if name.endswith("lora_magnitude_vector.weight") else name


def lora_layers(adapted: PeftModel) -> list[tuple[str, LoraLayer]]:
    """PEFT's layers by their paths."""
    from peft.tuners.lora import LoraLayer

    return [(name, module) for name, module in adapted.named_modules() if isinstance(module, LoraLayer)]


def set_dropout(adapted: PeftModel, probability: float, draws: Draws) -> None:
    """Replaces PEFT's dropout, which draws from a generator with a state, by one that is addressed."""
    for name, module in lora_layers(adapted):
        path = name.removeprefix(PREFIX)
        dropout = AddressedDropout(draws, path, probability) if probability else torch.nn.Identity()
        module.lora_dropout["default"] = dropout
    adapted.eval()


def fuse_products(adapted: PeftModel) -> None:
    """Has each layer and its adapter compute as one operation, where that is one that is known."""
    for _, module in lora_layers(adapted):
        fuse(module)


def set_training(layers: Sequence[LoraLayer], training: bool) -> None:
    """Turns dropout on the adapter's input on or off. No other module of the model knows that it is trained."""
    for layer in layers:
        module = cast(torch.nn.Module, layer)
        # Also for its own sake: DoRA reads it.
        if module.training != training:
            module.train(training)


@contextmanager
def switched_off(adapted: PeftModel) -> Iterator[None]:
    """The base alone meanwhile.

    PEFT's own switch also takes from the adapter that it is trained, which FSDP looks at once, at its first forward.
    """
    _switch(adapted, off=True)
    try:
        yield
    finally:
        _switch(adapted, off=False)


class Adapters:
    """Adapters on one base, of which one or none computes at a time."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._adapted: PeftModel | None = None
        self._selected: tuple[str | None] | None = (None,)

    def load(self, name: str, folder: Path) -> None:
        """Adds the adapter of a PEFT folder; what is there stays as it is where that fails."""
        _import_peft()
        from peft import PeftConfig, PeftModel

        self._selected = None
        try:
            if self._adapted is None:
                config = PeftConfig.from_pretrained(str(folder))
                config.inference_mode = True
                self._adapted = PeftModel(self._model, config, adapter_name=name)
            # PEFT would read it onto the first device that it finds.
            self._adapted.load_adapter(str(folder), name, torch_device="cpu")
            self._adapted.eval()
            self._check(name, folder)
        except Exception as error:
            self.unload(name)
            if isinstance(error, JobFailure):
                raise
            raise JobFailure("bad_parameters", "PEFT cannot put the adapter on the model") from error

    def unload(self, name: str) -> None:
        """Forgets an adapter, if it is there."""
        if self._adapted is not None and name in self._adapted.peft_config:
            self._selected = None
            self._adapted.delete_adapter(name)

    def select(self, name: str | None) -> None:
        """Has an adapter compute from here on, or the base alone."""
        if self._adapted is None or self._selected == (name,):
            return
        if name is not None:
            self._adapted.set_adapter(name)
        _switch(self._adapted, off=name is None)
        self._selected = (name,)

    def _check(self, name: str, folder: Path) -> None:
        """Fails where the file has other tensors than the adapter: PEFT passes over both."""
        from peft import get_peft_model_state_dict

        assert self._adapted is not None, "it has been loaded"
        state = get_peft_model_state_dict(self._adapted, adapter_name=name, save_embedding_layers=False)
        _compare(set(state), folder)


def _switch(adapted: PeftModel, off: bool) -> None:
    modules: list[Any] = [module for module in adapted.modules() if hasattr(module, "_disable_adapters")]
    for module in modules:
        module._disable_adapters = off


@contextmanager
def merged(adapted: PeftModel) -> Iterator[None]:
    """The adapter added to the weights that it is on meanwhile. Taken off again they would not be what they were, to the bit."""
    layers = [module.get_base_layer() for _, module in lora_layers(adapted)]
    weights = [(parameter, parameter.clone()) for layer in layers for parameter in layer.parameters(recurse=False)]
    cast(Any, adapted).merge_adapter()
    try:
        yield
    finally:
        cast(Any, adapted).unmerge_adapter()
        for parameter, before in weights:
            parameter.copy_(before)


def _put_in_place(adapted: PeftModel, folder: Path) -> None:
    """Reads the adapter's values where PEFT has made them on the meta device, as it does beside weights that are there."""
    values = load_file(folder / WEIGHTS_FILE)
    for name, parameter in list(adapted.named_parameters()):
        if parameter.is_meta and parameter.requires_grad and file_name(name) in values:
            path, _, leaf = name.rpartition(".")
            setattr(adapted.get_submodule(path), leaf, torch.nn.Parameter(values[file_name(name)]))


def _check(adapted: PeftModel, folder: Path) -> None:
    """Fails where the file and the model have different tensors: PEFT passes over those that it does not know."""
    names = {file_name(name) for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    _compare(names, folder, str(adapted.get_base_model().base_model_prefix))


def _compare(names: set[str], folder: Path, decoder: str = "") -> None:
    # PEFT puts the base's own weight beside an adapter on a head.
    with safe_open(folder / WEIGHTS_FILE, framework="pt") as file:
        there = {name for name in file.keys() if ".base_layer." not in name}  # noqa: SIM118
    if names != there:
        odd = ", ".join(f"`{name}`" for name in sorted(names ^ there)[:4])
        message = f"the adapter in `{folder}` and the model have different tensors: {odd}"
        help_ = "was it made for another model?"
        if there == {name.replace(f"{PREFIX}{decoder}.", PREFIX, 1) for name in names}:
            # PEFT would not find the tensors of such an adapter.
            help_ = (
                f"the model's files leave `{decoder}.` out: save the model anew with the names that transformers gives"
            )
        raise JobFailure("bad_parameters", message, help_)
