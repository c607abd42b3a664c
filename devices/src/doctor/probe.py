"""Says as JSON which packages of the torch worker are installed, and with `import` whether they can be imported."""

import json
import sys
from importlib import metadata, util

NAMES = ["torch", "torch_npu", "transformers", "peft", "safetensors", "pyarrow", "numpy", "bitsandbytes", "pipeline_torch_worker"]


def version(name):
    try:
        return metadata.version(name.replace("_", "-"))
    except metadata.PackageNotFoundError:
        # One that is found and was never installed, such as a checkout on PYTHONPATH.
        return "" if util.find_spec(name) else None


def attempt(name):
    try:
        __import__(name)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return None


said = {"python": sys.version.split()[0], "executable": sys.executable, "packages": {name: version(name) for name in NAMES}}
if sys.argv[1:] == ["import"]:
    said["torch_error"] = attempt("torch")
    if said["torch_error"] is None:
        import torch

        said["cuda"], said["hip"] = torch.version.cuda, torch.version.hip
        said["gpus"] = torch.cuda.device_count()
        if said["packages"]["torch_npu"]:
            said["npu_error"] = attempt("torch_npu")
            if said["npu_error"] is None:
                said["npus"] = torch.npu.device_count()
print(json.dumps(said))
