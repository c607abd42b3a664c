"""Training as the stage process directs it: each request is done on all ranks, and answered by rank 0."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import computing
from .checkpoint import SavedTensors
from .data import Batch, read_batches
from .device import Device
from .events import Voice
from .job import TrainJob
from .parallel import Ranks
from .precision import ScalerState
from .profile import Profiler, profiling
from .requests import CLOSE, Request, Requests
from .trainer import Stopped, Trainer


def run(job: TrainJob, device: Device, ranks: Ranks, voice: Voice, requests: Requests) -> None:
    """Serves requests until the one to close."""
    training = Training(Trainer(job, device, ranks), ranks, voice)
    trainer = training.trainer
    described = computing.describe(device, ranks, trainer.kernel)
    how = {"parallel": job.parallel, "compiled": trainer.is_compiled}
    voice.answer({**described, **how, "named_as_in_files": trainer.is_named_as_in_files})
    with profiling(job.profile, device, ranks.rank, job.run_folder) as profiler:
        while (request := requests.next()).name != CLOSE:
            training.serve(request, profiler)


class Training:
    """A model in training on this rank; rank 0 alone speaks."""

    def __init__(self, trainer: Trainer, ranks: Ranks, voice: Voice) -> None:
        self.trainer, self._ranks, self._voice = trainer, ranks, voice
        self._tasks: dict[str, Callable[[Request], Any]] = {
            "step": self._step,
            "score": self._score,
            "score_documents": self._score_documents,
            "save": self._save,
            "restore": self._restore,
            "check_frozen": self._check_frozen,
            "score_rows": self._infer,
            "generate": self._infer,
        }

    def serve(self, request: Request, profiler: Profiler) -> None:
        """Does what is asked for; what only prepares a step has no answer of its own."""
        self._ranks.step = self.trainer.steps + 1
        if request.name == "accumulate":
            self.trainer.accumulate(_batches(request), float(request.fields["weight"]))
            return
        if request.name == "weigh":
            self.trainer.weigh(request.fields["ranks"][self._ranks.rank])
            return
        self._voice.answer(self._tasks[request.name](request))
        if request.name == "step":
            profiler.step()

    def _step(self, request: Request) -> dict[str, Any]:
        report = self.trainer.step(float(request.fields["learning_rate"]))
        if isinstance(report, Stopped):
            return {"stopped": {"why": report.why, **report.details}}
        scaler = self.trainer.scaler_state
        loss_scaler = None if scaler is None else asdict(scaler)
        return {"done": {**asdict(report), "loss": _finite(report.loss), "loss_scaler": loss_scaler}}

    def _score(self, request: Request) -> list[float | None]:
        """The score of each rank's micro-batches; none where it is not finite."""
        scores = self._ranks.gather(self.trainer.score(_batches(request)), "gather validation losses")
        return [_finite(score) for score in scores]

    def _score_documents(self, request: Request) -> list[list[dict[str, float | None]]]:
        """The scores of each rank's documents."""
        fields = request.fields
        found = self.trainer.score_documents(_batches(request), bool(fields["held"]), fields["scorer"])
        ranks = self._ranks.gather_lists(found, "gather the scores of documents")
        return [
            [{"response_nll": _finite(response), "nll": _finite(nll)} for response, nll in of_rank] for of_rank in ranks
        ]

    def _save(self, request: Request) -> list[str]:
        files = self.trainer.save(Path(request.fields["folder"]), bool(request.fields["state"]))
        self._ranks.sum([0.0], "wait for all files")
        return files

    def _restore(self, request: Request) -> None:
        scaler = request.fields["loss_scaler"]
        with SavedTensors(request.fields["files"]) as saved:
            steps = int(request.fields["optimizer_steps"])
            self.trainer.restore(steps, saved, None if scaler is None else ScalerState(**scaler))

    def _infer(self, request: Request) -> dict[str, Any]:
        """Scores rows or completes prompts with the model as it is."""
        with self.trainer.inference() as inference:
            return inference.serve(request)

    def _check_frozen(self, _: Request) -> str | None:
        changed = self.trainer.check_frozen()
        found = self._ranks.gather_lists([] if changed is None else [changed], "compare what is frozen")
        return next((of_rank[0] for of_rank in found if of_rank), None)


def _batches(request: Request) -> list[list[Batch]]:
    return read_batches(request.fields["ranks"], request.payload)


def _finite(number: float) -> float | None:
    """JSON has no other."""
    return number if math.isfinite(number) else None
