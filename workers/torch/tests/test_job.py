"""Job files: the dataclasses are those of the schema, and what is wrong with a file is said all at once."""

from __future__ import annotations

import dataclasses
import json
import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import pytest

from pipeline_torch_worker import job as job_module
from pipeline_torch_worker.failure import Cause
from pipeline_torch_worker.job import TASKS
from pipeline_torch_worker.optimizers import OptimizerSettings
from support import PACKAGE, run_here, train_job

SCHEMA = json.loads((PACKAGE / "src" / "pipeline_torch_worker" / "job.schema.json").read_text())
PROTOCOL = json.loads((PACKAGE.parents[1] / "engine" / "protocol.schema.json").read_text())


def resolved(schema: dict[str, Any]) -> dict[str, Any]:
    while "$ref" in schema:
        schema = SCHEMA["$defs"][schema["$ref"].rsplit("/", 1)[1]]
    options = [option for option in schema.get("anyOf", []) if option.get("type") != "null"]
    return resolved(options[0]) if options else schema


def is_nullable(schema: dict[str, Any]) -> bool:
    if "$ref" in schema:
        return is_nullable(SCHEMA["$defs"][schema["$ref"].rsplit("/", 1)[1]])
    has_null = any(option.get("type") == "null" for option in schema.get("anyOf", []))
    return has_null or "null" in schema.get("type", [])


def same(kind: Any, schema: dict[str, Any], name: str) -> None:
    """Fails where a type is not what the schema says of it."""
    if get_origin(kind) in (Union, types.UnionType):
        assert is_nullable(schema), name
        (kind,) = [option for option in get_args(kind) if option is not type(None)]
    else:
        assert not is_nullable(schema), name
    schema = resolved(schema)
    if get_origin(kind) is Annotated:
        kind, limit = get_args(kind)
        assert schema["minimum"] == limit.least, name
    if kind is OptimizerSettings:
        # The options of each are in the table of optimizers.
        assert schema["required"] == ["name"], name
        assert schema["additionalProperties"], name
    elif dataclasses.is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        assert schema["additionalProperties"] is False, name
        assert hints.keys() == schema["properties"].keys(), name
        required = {
            field.name
            for field in dataclasses.fields(kind)
            if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        }
        assert required == set(schema["required"]), name
        for field, hint in hints.items():
            same(hint, schema["properties"][field], f"{name}.{field}")
    elif get_origin(kind) is Literal:
        assert list(get_args(kind)) == schema.get("enum", [schema.get("const")]), name
    else:
        expected = {list: "array", bool: "boolean", int: "integer", float: "number", str: "string", Path: "string"}
        found = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
        assert expected[get_origin(kind) or kind] in found, name


@pytest.mark.parametrize("task", TASKS)
def test_the_fields_are_those_of_the_schema(task: str) -> None:
    same(TASKS[task], SCHEMA["$defs"][task], task)


def test_causes_are_those_of_the_protocol() -> None:
    assert set(get_args(Cause)) <= set(PROTOCOL["$defs"]["cause"]["enum"])


def test_every_mistake_of_a_job_is_said_at_once(tmp_path: Path) -> None:
    job = train_job(tmp_path, "llama31", "attention", device="tpu", threads=0, dropout="much", sedd=1)
    del job["seed"]
    job["optimizer"]["beta"] = 0.9
    failed = run_here(tmp_path, job).failed
    assert failed["cause"] == "bad_parameters"
    (message,) = failed["messages"]
    for part in (
        '`device` is "tpu", not one of `cpu`, `cuda`, `rocm`, `npu`',
        "`threads` is 0, which is below 1",
        '`dropout` is "much", not a number',
        "`sedd` is not known",
        "`seed` is missing",
        "`optimizer.beta` is not known",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"adapter": None}, "`adapter` is null"),
        ({"dtype": "f16"}, "`loss_scale` is null"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    failed = run_here(tmp_path, train_job(tmp_path, "llama31", "attention", **changes)).failed
    assert failed["cause"] == "bad_parameters"
    assert words in failed["messages"][0]


def test_a_file_that_is_no_job_is_said_to_be_none(tmp_path: Path) -> None:
    failed = run_here(tmp_path, {"task": "dance"}).failed
    assert "`task` has to be one of `train`, `infer`" in failed["messages"][0]


def test_a_missing_device_is_said_with_what_to_do(tmp_path: Path) -> None:
    if job_module_has_cuda():
        pytest.skip("there is a CUDA device here")
    failed = run_here(tmp_path, train_job(tmp_path, "llama31", "attention", device="cuda")).failed
    assert failed["cause"] == "machine"
    assert "no cuda device can be used" in failed["messages"][0]


def job_module_has_cuda() -> bool:
    import torch

    assert job_module.TASKS
    return torch.cuda.is_available()


def test_a_quantised_model_is_refused(tmp_path: Path) -> None:
    job = train_job(tmp_path, "llama31", "attention")
    folder = tmp_path / "model"
    folder.mkdir()
    config = json.loads((Path(job["model"]) / "config.json").read_text())
    quantized = {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    (folder / "config.json").write_text(json.dumps({**config, **quantized}))
    failed = run_here(tmp_path, {**job, "model": str(folder)}).failed
    assert "`quantization_config` = " in failed["messages"][0]


def test_an_adapter_for_another_model_is_refused(tmp_path: Path) -> None:
    job = train_job(tmp_path, "llama31", "attention")
    other = train_job(tmp_path / "other", "llama31", "all_linear")
    config = json.loads((Path(other["adapter"]) / "adapter_config.json").read_text())
    config["target_modules"] = ["q_proj"]
    config["r"] = 4
    (Path(job["adapter"]) / "adapter_config.json").write_text(json.dumps(config))
    failed = run_here(tmp_path, job).failed
    assert failed["cause"] == "bad_parameters"
    assert "different tensors" in failed["messages"][0]
