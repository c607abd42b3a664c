"""`python -m pipeline_torch_worker JOB`, by itself or under torchrun: runs one job and says how it goes."""

from __future__ import annotations

import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

from .events import Voice
from .failure import failure_of
from .job import CompareJob, Job, ScoreJob, TrainJob, read_job

if TYPE_CHECKING:
    from .parallel import Ranks
    from .stopping import StopRequest

USAGE = "usage: python -m pipeline_torch_worker JOB   (or: torchrun … -m pipeline_torch_worker JOB)"
# Score and generate compute rows apart; their ranks meet at the end alone.
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
    code = run(Path(arguments[0]), voice)
    sys.stderr.flush()
    # Not by the interpreter's end: threads of a broken collective would hold it up.
    os._exit(code)


def run(path: Path, voice: Voice) -> int:
    """Runs a job file and says how it ended; the exit code."""
    ranks: Ranks | None = None
    try:
        job = read_job(path)
        from .stopping import StopRequest

        stop = StopRequest()
        stop.heed_signals()
        ranks = _join(job, voice, stop)
        how = _run(job, ranks, voice, stop)
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
    voice.finished(how)
    return 0


def _join(job: Job, voice: Voice, stop: StopRequest) -> Ranks:
    from .device import open_device
    from .parallel import Place, Ranks

    place = Place.of_environment()
    device = open_device(job.device, place.local_rank, job.threads // place.local_world)
    seconds = job.watchdog_seconds if isinstance(job, TrainJob) else UNWATCHED_SECONDS
    return Ranks.join(place, device, seconds, voice, stop)


def _run(job: Job, ranks: Ranks, voice: Voice, stop: StopRequest) -> dict[str, object]:
    if isinstance(job, TrainJob):
        from . import train

        return train.run(job, ranks.device, ranks, voice, stop)
    if isinstance(job, ScoreJob):
        from . import score

        return score.run(job, ranks.device, ranks, voice, stop)
    if isinstance(job, CompareJob):
        from . import compare

        return compare.run(job, ranks.device, ranks, voice, stop)
    from . import generate

    return generate.run(job, ranks.device, ranks, voice, stop)


if __name__ == "__main__":
    sys.exit(main())
