"""`python -m pipeline_torch_worker JOB`, one process for each rank: opens a model, and does what requests say."""

from __future__ import annotations

import os
import signal
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from .events import Voice
from .failure import failure_of
from .job import Job, ServeJob, TrainJob, read_job

if TYPE_CHECKING:
    from .parallel import Ranks

USAGE = "usage: python -m pipeline_torch_worker JOB   (started by `pipeline`, with requests on standard input)"
# Ranks compute rows and prompts apart, which may take one of them far longer than the others.
UNWATCHED_SECONDS = 24 * 3600.0


def main() -> int:
    """Runs the job file that the command line names."""
    arguments = sys.argv[1:]
    if len(arguments) != 1 or arguments[0] in ("-h", "--help"):
        print(USAGE, file=sys.stderr)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    # Before torch is imported: with torch_npu installed it would load it by itself, and fail where CANN is not there.
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    voice = Voice.of_process(int(os.environ.get("RANK", "0")))
    voice.started()
    code = run(Path(arguments[0]), voice, sys.stdin.buffer)
    sys.stderr.flush()
    # Not by the interpreter's end: threads of a broken collective would hold it up.
    os._exit(code)


def run(path: Path, voice: Voice, source: BinaryIO) -> int:
    """Runs a job file, with requests from `source`, and says how it ended; the exit code."""
    ranks: Ranks | None = None
    try:
        job = read_job(path)
        _leave_signals_to_the_stage()
        ranks = _join(job, voice)
        _serve(job, ranks, voice, source)
        ranks.leave()
    except BaseException as error:
        failure = failure_of(error)
        if failure is not error:
            traceback.print_exc()
        if ranks is not None:
            failure = ranks.fail(failure)
        voice.failed(failure)
        if ranks is not None:
            ranks.told()
        return 1
    voice.finished({})
    return 0


def _leave_signals_to_the_stage() -> None:
    """What asks the stage to stop reaches the ranks too; its process says what is still to be done, and ends them."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _join(job: Job, voice: Voice) -> Ranks:
    from .device import open_device
    from .parallel import Place, Ranks

    place = Place.of_environment()
    device = open_device(job.device, place.local_rank, job.threads // place.local_world)
    seconds = job.watchdog_seconds if isinstance(job, TrainJob) else UNWATCHED_SECONDS
    return Ranks.join(place, device, seconds, voice)


def _serve(job: Job, ranks: Ranks, voice: Voice, source: BinaryIO) -> None:
    from .requests import Requests

    requests = Requests(ranks, source)
    if isinstance(job, TrainJob):
        from . import train

        train.run(job, ranks.device, ranks, voice, requests)
    elif isinstance(job, ServeJob):
        from . import serving

        serving.run(job, ranks.device, ranks, voice, requests)
    else:
        from . import inference

        inference.run(job, ranks.device, ranks, voice, requests)


if __name__ == "__main__":
    sys.exit(main())
