"""The engine on a machine with a GPU: what it sees, who gets a device, and what becomes of memory that is not enough."""

import json
import re
import sys
import time

from common import Left, Project, Report, arguments, losses

PIPELINE = "torch.yaml"
# 128 rows of 8192 tokens in a micro-batch: what is kept for the backward is some 8 GiB a row.
ROWS, TOKENS = 128, 8192
LARGE = [
    "questions.source=./long.jsonl", "questions.split=train", f"tokens.max_seq_len={TOKENS}", f"packs.max_seq_len={TOKENS}",
    "fresh.hidden_size=2048", "fresh.intermediate_size=8192", "fresh.num_hidden_layers=16", "fresh.num_attention_heads=16",
    f"fresh.max_position_embeddings={TOKENS}", "adapter.epochs=100", "adapter.max_steps=2", "adapter.scheduler=constant",
    f"adapter.micro_batch_size={ROWS}", "adapter.gradient_accumulation_steps=1", "adapter.eval_steps=1000",
]


def inventory(project):
    """The devices, and what the doctor says of the machine."""
    return {"devices": project.json("devices"), "doctor": project.json("devices", "doctor", code=None)}


def leases(project):
    """Two runs that want the only device: the second waits until the first is done."""
    count = len([device for device in project.json("devices")["devices"] if device["kind"] == project.device])
    one = [*project.on_device("adapter"), f"adapter.resources.count={count}", "adapter.max_steps=30"]
    project.run("run", PIPELINE, "--until", "packs", "--until", "held_out_tokens", *one)
    began = time.monotonic()
    homes = ["--home=first", "--home=second"]
    for home in homes:
        project.run("run", PIPELINE, "--until", "packs", "--until", "held_out_tokens", home, *one)
    runs = [project.start("run", PIPELINE, "--until", "adapter", home, *one) for home in homes]
    said = [run.communicate() for run in runs]
    assert all(run.returncode == 0 for run in runs), said
    waited = [bool(re.search(r"wait(s|ing)", out + errors)) for out, errors in said]
    return {"devices": count, "one_waited": any(waited), "seconds_of_both": round(time.monotonic() - began, 1)}


def out_of_memory(project):
    """A micro-batch that the device has no memory for: it is halved until it fits, and the result has the same key."""
    if project.device == "cpu":
        raise Left("on the processor it would be the machine's memory")
    words = " ".join("Where is it that the fox sees the hen?" for _ in range(TOKENS // 8))
    row = json.dumps({"question": "Who sees the fox?", "answer": words}) + "\n"
    (project.folder / "long.jsonl").write_text(row * ROWS)
    overrides = ["--home=large", *LARGE, *project.on_device("adapter", dtype="bf16")]
    said = project.run("run", PIPELINE, "--until", "adapter", *overrides)
    halved = re.findall(r"micro-batch[^.\n]*", said)
    assert halved, "nothing is said of a smaller micro-batch:\n" + said
    found = losses(project.records("adapter", PIPELINE, *overrides))
    again = project.run("run", PIPELINE, "--until", "adapter", *overrides)
    assert "nothing to do" in again, again
    return {"said": halved[:5], "losses": found}


def promised(project):
    """A promise of memory that the device does not have is refused, and one that it has is kept."""
    if project.device == "cpu":
        raise Left("`memory` promises a device's memory")
    overrides = [*project.on_device("adapter"), "adapter.max_steps=2", "--home=promised"]
    too_much = project.run("run", PIPELINE, "--until", "adapter", *overrides, "adapter.resources.memory=100TB", code=None)
    kept = project.run("run", PIPELINE, "--until", "adapter", *overrides, "adapter.resources.memory=1GB")
    return {"too_much": too_much[-400:], "kept": kept[-200:]}


def main():
    options = arguments(__doc__)
    project, report = Project(options.pipeline, options.device), Report(options.out)
    checks = {
        "inventory": inventory,
        "two runs, one device": leases,
        "out of memory": out_of_memory,
        "promises": promised,
    }
    for name, check in checks.items():
        if options.only in name:
            report.check(name, lambda check=check: check(project))
    return report.code()


if __name__ == "__main__":
    sys.exit(main())
