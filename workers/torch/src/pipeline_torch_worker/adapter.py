"""The adapter: PEFT's modules in the base model, their tensors by the names of its files, and the folder that is left."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors.torch import load_file
from transformers import PreTrainedModel

from .draws import AddressedDropout, Draws
from .failure import JobFailure
from .products import fuse

# PEFT is imported where an adapter is there: that takes as long as all the rest, and not every job has one.
if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from peft.tuners.lora import LoraLayer

WEIGHTS_FILE = "adapter_model.safetensors"
PREFIX = "base_model.model."
# What PEFT writes beside an adapter on an embedding or a head, and beside a module that is saved as a whole: the base's own, and
# that module again.
BESIDE = (".base_layer.", ".original_module.", ".modules_to_save.")
# What it saves with an adapter whose model had a vocabulary of another size than its base.
TABLES = ("model.embed_tokens", "lm_head")
EMBEDDING_ROWS, HEAD_ROWS = (f"{PREFIX}{table}.token_adapter.trainable_tokens_delta" for table in TABLES)


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
    from peft import PeftModel, set_peft_model_state_dict

    try:
        config, values = _read(model, folder)
        config.inference_mode = not trained
        adapted = PeftModel(model, config)
        set_peft_model_state_dict(adapted, values)
    except Exception as error:
        raise JobFailure("bad_parameters", f"PEFT cannot put the adapter in `{folder}` on the model") from error
    adapted.eval()
    if trained:
        _put_in_place(adapted, values)
        for parameter in adapted.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.float()
    _check(adapted, "default", set(values), folder)
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
        from peft import PeftModel, set_peft_model_state_dict

        self._selected = None
        try:
            config, values = _read(self._model, folder)
            config.inference_mode = True
            if self._adapted is None:
                self._adapted = PeftModel(self._model, config, adapter_name=name)
            else:
                self._adapted.add_adapter(name, config)
            set_peft_model_state_dict(self._adapted, values, adapter_name=name)
            self._adapted.eval()
            _check(self._adapted, name, set(values), folder)
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


def _read(model: PreTrainedModel, folder: Path) -> tuple[PeftConfig, dict[str, torch.Tensor]]:
    """The settings and the values of an adapter, without what PEFT writes of the base beside them.

    PEFT puts an embedding or a head that it saved with an adapter into the base. Here one that is not the base's is a module that
    is saved as a whole: it takes the place of the base's where this adapter computes, and is trained with it.
    """
    from peft import PeftConfig

    config: Any = PeftConfig.from_pretrained(str(folder))
    values = load_file(folder / WEIGHTS_FILE)
    values = {name: value for name, value in values.items() if not any(part in name for part in BESIDE)}
    for table in TABLES:
        name, saved = f"{PREFIX}{table}.weight", config.modules_to_save or []
        if name not in values or any(f".{table}".endswith(f".{module}") for module in saved):
            continue
        if _is_same(_weight(model, table), values[name]):
            del values[name]
        else:
            config.modules_to_save = [*saved, table]
    # PEFT writes the rows of a tied embedding once more, as those of the head.
    table_rows, head_rows = values.get(EMBEDDING_ROWS), values.get(HEAD_ROWS)
    is_named = "lm_head" in (config.trainable_token_indices or ())
    if not is_named and table_rows is not None and head_rows is not None and torch.equal(table_rows, head_rows):
        del values[HEAD_ROWS]
    return config, values


def _weight(model: PreTrainedModel, path: str) -> torch.Tensor:
    """The base's weight at a path, which adapters may have wrapped before."""
    module = model.get_submodule(path)
    module = getattr(module, "original_module", module)
    return cast(torch.Tensor, getattr(module, "base_layer", module).weight)


def _is_same(ours: torch.Tensor, saved: torch.Tensor) -> bool:
    """Whether a tensor is the base's, in the type that it was saved in."""
    return torch.equal(ours.detach().to("cpu", saved.dtype).to(ours.dtype), saved.to(ours.dtype))


def _put_in_place(adapted: PeftModel, values: dict[str, torch.Tensor]) -> None:
    """Sets the adapter's values where PEFT has made them on the meta device, as it does beside weights that are there."""
    for name, parameter in list(adapted.named_parameters()):
        if parameter.is_meta and parameter.requires_grad and file_name(name) in values:
            path, _, leaf = name.rpartition(".")
            setattr(adapted.get_submodule(path), leaf, torch.nn.Parameter(values[file_name(name)]))


def _check(adapted: PeftModel, adapter: str, there: set[str], folder: Path) -> None:
    """Fails where the file has other tensors than the adapter in the model: PEFT passes over both."""
    from peft import get_peft_model_state_dict

    names = set(get_peft_model_state_dict(adapted, adapter_name=adapter, save_embedding_layers=False))
    if names != there:
        odd = ", ".join(f"`{name}`" for name in sorted(names ^ there)[:4])
        message = f"the adapter in `{folder}` and the model have different tensors: {odd}"
        help_ = "was it made for another model?"
        decoder = adapted.get_base_model().base_model_prefix
        if there == {name.replace(f"{PREFIX}{decoder}.", PREFIX, 1) for name in names}:
            # PEFT would not find the tensors of such an adapter.
            help_ = (
                f"the model's files leave `{decoder}.` out: save the model anew with the names that transformers gives"
            )
        raise JobFailure("bad_parameters", message, help_)
