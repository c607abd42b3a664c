"""The torch worker on a device beside the native results of the processor, on the models and rows of the tests."""

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

from common import Left, Project, Report, apart, arguments, losses

TORCH, PAIRS = "torch.yaml", "preference.yaml"
# How far losses may be apart, relatively.
BOUNDS = {"f32": 1e-4, "bf16": 1e-2, "f16": 1e-2}


def trained(project, pipeline, *overrides):
    """The losses of a training."""
    project.run("run", pipeline, "--until", "adapter", *overrides)
    return losses(project.records("adapter", pipeline, *overrides))


def like_native(project, name, *more, dtype="f32", pipeline=TORCH, resources=()):
    """Trains natively on the processor, and by the worker on the device."""
    native = [f"--home=native-{name}", "adapter.backend=native", "adapter.resources.device=cpu", *more]
    device = [f"--home=device-{name}", *project.on_device("adapter", dtype=dtype), *more, *resources]
    expected, found = trained(project, pipeline, *native), trained(project, pipeline, *device)
    worst = apart(found, expected)
    assert worst <= BOUNDS[dtype], f"losses are {worst:.1e} apart: {found} and {expected}"
    return {"losses_apart": worst, "steps": len(found)}


def all_weights(project):
    """All weights of the model, in a file without what asks for an adapter."""
    text = (project.folder / TORCH).read_text()
    training, _ = text.split("  scores:")
    lines = [line for line in training.splitlines(keepends=True) if "lora:" not in line]
    changed = "".join(lines).replace("      data: packs\n", "      data: packs\n      method: full\n")
    (project.folder / "full.yaml").write_text(changed)
    return like_native(project, "full", pipeline="full.yaml")


def attention(project, kind):
    """An attention on packed rows beside SDPA."""
    # Heads of 16: flex attention has none narrower.
    overrides = [*project.on_device("adapter", dtype="bf16"), "adapter.lora.dropout=0", "fresh.hidden_size=64"]
    expected = trained(project, TORCH, "--home=sdpa", *overrides, "adapter.attention=sdpa")
    found = trained(project, TORCH, f"--home={kind}", *overrides, f"adapter.attention={kind}")
    worst = apart(found, expected)
    assert worst <= BOUNDS["bf16"], f"losses are {worst:.1e} apart"
    return {"losses_apart": worst}


def four_bits(project, *more):
    """An adapter on a base in NF4."""
    try:
        import bitsandbytes
    except ImportError as error:
        raise Left("bitsandbytes is not installed") from error
    found = like_native(project, f"nf4-{len(more)}", "adapter.quantize={base: nf4}", *more)
    return {**found, "bitsandbytes": bitsandbytes.__version__}


def asked(project):
    """Figures and answers of an evaluation and a generation."""
    trained_here = ["adapter.max_steps=6", "adapter.backend=native", "adapter.resources.device=cpu"]
    native = ["--home=asked", *trained_here, "scores.backend=native", "samples.backend=native"]
    device = ["--home=asked-there", *trained_here, *project.on_device("scores", "samples")]
    project.run("run", TORCH, *native)
    project.run("run", TORCH, *device)

    def figures(*overrides):
        folder = project.exported("scores.metrics", TORCH, *overrides)
        return json.loads((folder / "metrics.json").read_text())["perplexity"]["value"]

    def answers(*overrides):
        return (project.exported("samples.samples", TORCH, *overrides) / "samples.txt").read_text()

    worst = apart([figures(*device)], [figures(*native)])
    assert worst <= BOUNDS["f32"], f"perplexities are {worst:.1e} apart"
    assert answers(*device) == answers(*native), "greedy answers differ"
    return {"perplexities_apart": worst}


def rank_of(program):
    """The processes of the worker below the program."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                command = (entry / "cmdline").read_bytes().split(b"\0")
                status = (entry / "status").read_text()
            except OSError:
                continue
            if b"pipeline_torch_worker" in command and int(re.search(r"PPid:\s+(\d+)", status)[1]) != 1:
                found.append(int(entry.name))
    return found if program.poll() is None else []


def killed(project):
    """A killed rank costs no step: the next run ends as if nothing had happened."""
    overrides = [*project.on_device("adapter"), "adapter.max_steps=60", "adapter.save_every=4"]
    expected = trained(project, TORCH, "--home=whole", *overrides)
    process = project.start("run", TORCH, "--until", "adapter", "--home=killed", *overrides)
    deadline = time.monotonic() + 120
    partial = project.folder / "killed/store/partial"
    while not any(int(saved.name[5:]) > 0 for saved in partial.glob("*/step-*")) and time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"it ended first: {process.communicate()}")
        time.sleep(0.05)
    ranks = rank_of(process)
    assert ranks, "no process of the worker"
    os.kill(ranks[0], signal.SIGKILL)
    process.communicate()
    assert process.returncode != 0, "a killed rank was not noticed"
    said = project.run("run", TORCH, "--until", "adapter", "--home=killed", *overrides)
    resumed = re.search(r"resuming from step (\d+) of", said)
    found = losses(project.records("adapter", TORCH, "--home=killed", *overrides))
    worst = apart(found, expected)
    assert resumed and worst <= 1e-6, f"losses are {worst:.1e} apart after {resumed}"
    return {"resumed_from_step": int(resumed[1]), "losses_apart": worst}


def memory(project, hidden, layers, length):
    """The peak of the device beside the estimate of `plan`."""
    more = [f"fresh.hidden_size={hidden}", f"fresh.intermediate_size={4 * hidden}", f"fresh.num_hidden_layers={layers}"]
    more += [f"fresh.max_position_embeddings={length}", f"packs.max_seq_len={length}", "adapter.max_steps=3", "adapter.epochs=4000"]
    overrides = [f"--home=memory-{hidden}", *more, *project.on_device("adapter", dtype="bf16")]
    project.run("run", TORCH, "--until", "packs", "--until", "fresh", "--until", "held_out_tokens", *overrides)
    planned = project.json("plan", TORCH, *overrides)
    project.run("run", TORCH, "--until", "adapter", *overrides)
    stage = next(stage for stage in planned["stages"] if stage["stage"] == "adapter")
    shown = project.json("runs", "show", "latest", "adapter", f"--home=memory-{hidden}")
    peak = max(shown["how"]["peak_memory_bytes_of_ranks"])
    estimated = (stage.get("preflight") or {}).get("peak_memory_bytes")
    return {"peak_bytes": peak, "estimated_bytes": estimated}


def pairs(project):
    """A project whose pairs prefer an answer to that of another question, as tests/torch/preference.rs makes it."""
    rows = [json.loads(line) for line in (project.folder / "questions.jsonl").read_text().splitlines()[:24]]
    made = [
        {"prompt": row["question"], "chosen": row["answer"], "rejected": rows[(index + 5) % len(rows)]["question"]}
        for index, row in enumerate(rows)
    ]
    judged = [
        {"prompt": pair["prompt"], "completion": pair["chosen" if index % 4 < 3 else "rejected"], "label": index % 4 < 3}
        for index, pair in enumerate(made)
    ]
    for name, lines in {"pairs": made[:18], "held_out": made[18:], "judged": judged}.items():
        (project.folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def main():
    options = arguments(__doc__)
    project, report = Project(options.pipeline, options.device), Report(options.out)
    pairs(project)
    device = options.device
    dora = "adapter.lora.use_dora=true"
    checks = {
        "machine": lambda: {
            "devices": project.json("devices"),
            "doctor": project.json("devices", "doctor", code=None),
            "versions": {name: __import__(name).__version__ for name in ("torch", "transformers", "peft")},
        },
        "lora, f32": lambda: like_native(project, "f32"),
        "lora, bf16": lambda: like_native(project, "bf16", "adapter.lora.dropout=0", dtype="bf16"),
        "lora, recomputed layers": lambda: like_native(project, "again", "adapter.activation_checkpointing=true"),
        "dora": lambda: like_native(project, "dora", dora),
        "all weights": lambda: all_weights(project),
        "qlora": lambda: four_bits(project),
        "qlora with dora": lambda: four_bits(project, dora),
        "dpo": lambda: like_native(project, "dpo", pipeline=PAIRS),
        "evaluate and generate": lambda: asked(project),
        "a killed rank": lambda: killed(project),
        **{f"attention: {kind}": lambda kind=kind: attention(project, kind) for kind in ("flex", "flash") if device != "cpu"},
        **{
            f"memory, {hidden}x{layers}": lambda shape=(hidden, layers, length): memory(project, *shape)
            for hidden, layers, length in ([(64, 2, 128)] if device == "cpu" else [(512, 8, 1024), (1024, 16, 2048)])
        },
    }
    for name, check in checks.items():
        if options.only in name:
            report.check(name, check)
    return report.code()


if __name__ == "__main__":
    sys.exit(main())
