"""One training run: its steps, with validation and saved states between them, and its result."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

from . import adapter, checkpoint, output
from .checkpoint import Progress, State
from .data import RowTable, StepPlan, listed, read_steps
from .device import Device
from .events import Voice
from .failure import JobFailure
from .figures import Teller, Tokens
from .job import TrainJob
from .model import read_config
from .parallel import Ranks
from .profile import Profiler, profiling
from .stopping import StopRequest
from .trainer import MicroBatch, StepReport, Trainer


def run(job: TrainJob, device: Device, ranks: Ranks, voice: Voice, stop: StopRequest) -> dict[str, object]:
    """Runs the job; how it was computed."""
    session = Session(job, device, ranks, voice, stop)
    with profiling(job.profile, device, ranks.rank, job.run_folder) as profiler:
        session.train(profiler)
    session.conclude()
    return session.leave_result()


class Session:
    """A run on this rank; rank 0 alone speaks and writes."""

    def __init__(self, job: TrainJob, device: Device, ranks: Ranks, voice: Voice, stop: StopRequest) -> None:
        self._job, self._device, self._ranks, self._voice, self._stop = job, device, ranks, voice, stop
        self._steps = read_steps(job.steps, job.total_steps)
        self._steps_per_epoch = sum(step.epoch == self._steps[0].epoch for step in self._steps)
        self._rows = RowTable(job.data)
        self._validation = None if job.validation is None else RowTable(job.validation)
        self._trainer = Trainer(job, device, ranks)
        if job.method == "full":
            output.check_names(job.model, self._trainer.in_files(self._trainer.parameters))
        # Another number of ranks adds in another order.
        parts = [f"torch {output.versions()['torch']}", device.kind, job.dtype, self._trainer.kernel]
        computed_by = ", ".join([job.computed_by, *parts, f"ranks: {ranks.world}"])
        self._progress = Progress.fresh(job.total_steps, computed_by)
        metrics = "" if job.resume is None else self._resume()
        self._teller = Teller(metrics, voice)
        self._unsaved = False

    def _resume(self) -> str:
        assert self._job.resume is not None
        saved = checkpoint.load(self._job.resume)
        fresh, self._progress = self._progress, saved.progress
        self._progress.total_steps, self._progress.computed_by = fresh.total_steps, fresh.computed_by
        self._trainer.restore(saved.progress.optimizer_steps, saved.trained, saved.progress.loss_scaler)
        self._voice.progress(
            "steps", saved.progress.step, fresh.total_steps, f"resumed from step {saved.progress.step}"
        )
        return saved.metrics

    def train(self, profiler: Profiler) -> None:
        """Steps, validations and saved states up to the end of the run."""
        while True:
            # A saved step may be one whose validation was cut off.
            if self._validation_is_due():
                best = self._validate()
                self._unsaved = True
                if best and self._job.keep_best:
                    self._save_best()
            over = self._is_over()
            if self._unsaved and (over or self._progress.step % self._job.save_every == 0):
                self._save()
            if over:
                return
            self._step()
            profiler.step()

    def _is_over(self) -> bool:
        ends_early = self._progress.validation.ends_early(self._job.early_stopping)
        return self._progress.step >= self._progress.total_steps or ends_early

    def _step(self) -> None:
        plan = self._steps[self._progress.step]
        self._ranks.step = self._progress.step + 1
        micro_batches = self._micro_batches(self._rows, plan.rows)
        counts = [
            sum(micro_batch.batch.target_tokens for micro_batch in micro_batches),
            sum(micro_batch.batch.tokens for micro_batch in micro_batches),
            sum(micro_batch.padded for micro_batch in micro_batches),
            # Signals reach the ranks at different times; they stop together.
            float(bool(self._stop)),
        ]
        targets, computed, padded, stopping = self._ranks.sum(counts, "add up targets")
        if stopping:
            self._end_cancelled()
        # A skipped step holds the schedule.
        rate = self._steps[self._progress.step - self._progress.skipped_steps].learning_rate
        self._progress.step += 1
        self._unsaved = True
        if targets == 0:
            self._voice.warning(f"step {self._progress.step} has no target token and changes nothing")
            return
        report = self._trainer.step(micro_batches, int(targets), rate)
        self._tell(plan, report, rate, Tokens(targets, computed, padded))

    def _micro_batches(self, table: RowTable, rows: Sequence[int]) -> list[MicroBatch]:
        """This rank's share of rows: every so manyth one, so that shares differ by one row at most."""
        ours = rows[self._ranks.rank :: self._ranks.world]
        at_once = max(1, self._job.micro_batch_size // self._ranks.world)
        cut = [ours[start : start + at_once] for start in range(0, len(ours), at_once)]
        return [MicroBatch.of([table.row(number) for number in numbers]) for numbers in cut]

    def _tell(self, plan: StepPlan, report: StepReport, rate: float, tokens: Tokens) -> None:
        if report.skipped:
            self._progress.skipped_steps += 1
        else:
            self._progress.target_tokens += report.target_tokens
        record = {
            "kind": "train",
            "step": self._progress.step,
            "epoch": plan.epoch,
            "loss": report.loss,
            "learning_rate": rate,
            "grad_norm": report.grad_norm,
            "rows": len(plan.rows),
            "tokens": int(tokens.computed),
            "target_tokens": report.target_tokens,
            "loss_scale": report.loss_scale,
            "skipped": report.skipped,
        }
        self._teller.step(record, tokens, report.peak_memory_bytes, self._progress.total_steps)

    def _validation_is_due(self) -> bool:
        step, every = self._progress.step, self._job.eval_steps or self._steps_per_epoch
        return self._validation is not None and self._progress.validation.last != step and step % every == 0

    def _validate(self) -> bool:
        """Scores the validation rows after the last whole step; whether it is the best one."""
        assert self._validation is not None
        began, step = time.monotonic(), self._progress.step
        rows = range(len(self._validation))
        micro_batches = self._micro_batches(self._validation, rows)
        counts = [self._trainer.score(micro_batches), float(sum(m.batch.target_tokens for m in micro_batches))]
        nll, targets = self._ranks.sum(counts, "add up validation losses")
        if targets == 0:
            message = "no validation row has a target token: there is nothing to measure"
            raise JobFailure("bad_data", message, "look at the rows with `pipeline show`")
        loss = nll / targets
        if not math.isfinite(loss):
            raise _validation_not_finite(loss, step, rows)
        best = self._progress.validation.add(step, loss, self._job.early_stopping)
        epoch = self._steps[step - 1].epoch if step else 0
        record = {
            "kind": "validation",
            "step": step,
            "epoch": epoch,
            "loss": loss,
            "rows": len(rows),
            "target_tokens": int(targets),
            "best": best,
        }
        self._teller.validation(record, time.monotonic() - began, self._progress.total_steps)
        return best

    def _save(self) -> None:
        """Saves the state after the last whole step; nobody goes on before it lies on the disk."""
        self._progress.optimizer_steps = self._trainer.steps
        scaler = self._trainer.scaler_state
        self._progress.loss_scaler = None if scaler is None else dataclasses.replace(scaler)
        trained = self._trainer.trained()
        if self._ranks.rank == 0:
            checkpoint.save(self._job.working, State(self._progress, trained, self._teller.lines), self._job.keep_last)
            self._voice.checkpoint(self._progress.step)
        self._ranks.sum([0.0], "wait for the saved state")
        self._unsaved = False

    def _save_best(self) -> None:
        values = self._trainer.trained().values
        if self._ranks.rank == 0:
            self._progress.best_weights = checkpoint.save_best(self._job.working, self._progress.step, values)

    def _end_cancelled(self) -> None:
        step, total = self._progress.step, self._progress.total_steps
        message = "stopped before the first step was done"
        if step > 0:
            if self._unsaved:
                self._save()
            message = f"stopped after step {step} of {total}, which is saved"
        raise JobFailure("cancelled", message, "run again to go on from there")

    def conclude(self) -> None:
        """What follows the last step and is no part of the working state, so that a longer run can go on from there."""
        if self._progress.skipped_steps == self._progress.step:
            message = "the gradients of every step overflowed: nothing was trained"
            raise JobFailure("numeric", message, "compute in bf16 or f32, or begin with a lower loss scale")
        if self._progress.target_tokens == 0:
            help_ = "look at the rows with `pipeline show`: are the labels all masked?"
            raise JobFailure("bad_data", "no row has a target token: nothing was trained", help_)
        if self._validation is not None and self._progress.validation.last != self._progress.step:
            self._validate()
        best = self._progress.validation.best
        if not self._job.keep_best or best is None or best.step == self._progress.step:
            return
        # Rank 0 wrote the file, and knows its digest; where it is right for one rank it is right for all.
        kept = self._progress.best_weights if self._ranks.rank == 0 else None
        self._trainer.take_values(checkpoint.load_best(self._job.working, best.step, kept.digest if kept else None))

    def leave_result(self) -> dict[str, object]:
        """Writes what the stage process makes outputs of; how it was computed."""
        job, folder = self._job, self._job.output
        values = self._trainer.trained().values
        how = {**output.how_computed(self._device, self._ranks, self._trainer.kernel), "parallel": job.parallel}
        if self._ranks.rank == 0:
            if job.method == "lora":
                assert job.adapter is not None
                adapter.write(values, job.adapter, folder / "adapter")
            else:
                output.write_model(self._trainer.in_files(values), job.model, read_config(job.model), folder / "model")
            (folder / "metrics.jsonl").write_text(self._teller.lines, encoding="utf-8")
            output.write_summary(folder, how, self._progress)
        self._ranks.sum([0.0], "wait for the result")
        return how


def _validation_not_finite(loss: float, step: int, rows: Sequence[int]) -> JobFailure:
    if step == 0:
        help_ = "nothing has been trained yet: the model or the adapter to go on from is at fault"
    else:
        help_ = "lower `optimizer.learning_rate`, or set `clip_grad_norm`"
    message = f"the validation loss is {loss} after step {step}"
    return JobFailure("numeric", message, f"{help_}; the rows of the validation data: {listed(rows)}")
