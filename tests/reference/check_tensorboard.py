"""Reads the curves of a training run with TensorBoard's own reader and compares them with the run's metrics.

    pip install tensorboard
    pipeline run tests/pipelines/resume.yaml
    pipeline export tests/pipelines/resume.yaml adapter.metrics /tmp/metrics
    python tests/reference/check_tensorboard.py .pipeline/runs/RUN/adapter/tensorboard /tmp/metrics/metrics.jsonl

Every figure of `metrics.jsonl` that is a number has a curve `kind/name` with the same value (f32) at the same step, for the steps that
this run did; the rates and the memory have curves that are nowhere else.
"""

import json
import math
import struct
import sys

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

folder, metrics = sys.argv[1:]
events = EventAccumulator(folder, size_guidance={"scalars": 0})
events.Reload()
curves = {tag: {event.step: event for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
assert curves, f"no curves in {folder}"

first = min(min(curve) for tag, curve in curves.items() if tag.startswith("train/"))
compared = 0
for line in open(metrics):
    record = json.loads(line)
    step = record["step"]
    if step < first:
        continue  # done by the run that this one continued
    for name, value in record.items():
        if name == "step" or isinstance(value, (bool, str)) or value is None:
            continue
        found = curves[f"{record['kind']}/{name}"][step].value
        assert found == struct.unpack("f", struct.pack("f", value))[0], (record, name, found)
        compared += 1

for tag in ["trained_tokens_per_second", "tokens_per_second", "padded_tokens_per_second", "peak_memory_bytes"]:
    values = [event.value for event in curves[f"train/{tag}"].values()]
    assert all(math.isfinite(value) and value > 0 for value in values), (tag, values)
times = [event.wall_time for event in events.Scalars("train/loss")]
assert times == sorted(times)
print(f"{compared} values in {len(curves)} curves agree, steps {first} to {max(curves['train/loss'])}")
