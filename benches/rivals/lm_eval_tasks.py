"""lm-evaluation-harness on the CPU, as `benches/tasks.py` runs it: a line of JSON with the figures; the log-likelihoods are written to `theirs.json`."""

import json
import os
import sys
from pathlib import Path

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", HF_DATASETS_CACHE="datasets")

import torch  # noqa: E402
from lm_eval import simple_evaluate  # noqa: E402
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

job = json.loads(sys.argv[1])
torch.set_num_threads(job["threads"])
folder = Path(job["folder"])
model = HFLM(pretrained=str(folder / "model"), dtype=job["dtype"], device="cpu", batch_size=job["batch_size"], max_length=2048)
manager = TaskManager(include_path=str(folder), include_defaults=False)
found = simple_evaluate(
    model, tasks=["beside"], task_manager=manager, num_fewshot=job["num_fewshot"], log_samples=True, bootstrap_iters=0
)  # fmt: skip
samples = sorted(found["samples"]["beside"], key=lambda sample: sample["doc_id"])
answers = [[answer[0] for answer in sample["filtered_resps"]] for sample in samples]
(folder / "theirs.json").write_text(json.dumps(answers))
print(json.dumps({key: value for key, value in found["results"]["beside"].items() if isinstance(value, float)}))
