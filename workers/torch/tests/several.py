"""Runs several jobs one after the other in the same ranks: `torchrun … several.py JOB JOB …`. Starting ranks takes far longer."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from pipeline_torch_worker.__main__ import run
from pipeline_torch_worker.events import Voice


def main() -> None:
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    for number, job in enumerate(sys.argv[1:]):
        # As if torchrun had started the ranks again: what the job before it left in their store is not read.
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(number)
        said = None
        if os.environ.get("RANK", "0") == "0":
            said = Path(job).with_name("events.jsonl").open("w", encoding="utf-8")
        code = run(Path(job), Voice(said))
        if code != 0:
            sys.exit(code)


if __name__ == "__main__":
    main()
