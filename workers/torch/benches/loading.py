"""What a rank of `fsdp2` reads and holds while a model is loaded: its share of each tensor, and, beside that, the whole checkpoint.

    python benches/loading.py --ranks 2 --layers 12 --hidden 1024

Makes an olmo2 of random weights in bf16, as published ones are, to train every weight of it in f32. Starts the ranks on the CPU
(gloo), and prints for each way the bytes that a rank read of the checkpoint and by how much its resident memory rose at most: its
own, and that of mapped files (sampled every 2 ms).
"""

from __future__ import annotations

import argparse
import contextlib
import io
import multiprocessing
import os
import socket
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.distributed as dist
from transformers import AutoConfig, AutoModelForCausalLM

from pipeline_torch_worker.attention import NAME
from pipeline_torch_worker.device import open_device
from pipeline_torch_worker.draws import Draws
from pipeline_torch_worker.job import TrainJob
from pipeline_torch_worker.model import DocumentLoss, load_base, load_empty, read_config
from pipeline_torch_worker.sharding import shard


def resident_bytes() -> list[int]:
    """Memory that this process has resident: of its own, and of mapped files."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return [int(fields[name].split()[0]) * 1024 for name in ("RssAnon", "RssFile")]


def peaks_of(work: Callable[[], None]) -> list[int]:
    """The most resident memory of each kind while it runs, less that before."""
    before, over = resident_bytes(), threading.Event()
    peaks = list(before)

    def sample() -> None:
        while not over.is_set():
            peaks[:] = [max(pair) for pair in zip(peaks, resident_bytes(), strict=True)]
            time.sleep(0.002)

    sampler = threading.Thread(target=sample)
    sampler.start()
    work()
    over.set()
    sampler.join()
    return [peak - at_first for peak, at_first in zip(peaks, before, strict=True)]


def rank_of(rank: int, ranks: int, port: int, folder: Path, way: str, results: Any) -> None:
    """Loads and shards the model on one rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(ranks))
    dist.init_process_group("gloo")
    device = open_device("cpu", rank, 1)
    config = read_config(folder)
    job = SimpleNamespace(method="full", dtype="f32", model=folder)

    def load() -> None:
        model = (load_empty if way == "shares" else load_base)(folder, config, torch.float32, NAME)
        shard(DocumentLoss(model, "sdpa", Draws(0)), cast(TrainJob, job), device, ranks)

    told = io.StringIO()
    with contextlib.redirect_stderr(told):
        own, mapped = peaks_of(load)
    read = [int(line.split()[4]) for line in told.getvalue().splitlines() if "has read" in line]
    results.put((rank, read[0] if read else None, own, mapped))
    dist.destroy_process_group()


def main() -> None:
    """Measures both ways."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--hidden", type=int, default=1024)
    given = parser.parse_args()
    shape = {"hidden_size": given.hidden, "intermediate_size": 3 * given.hidden, "num_hidden_layers": given.layers}
    shape |= {"num_attention_heads": 16, "num_key_value_heads": 16, "vocab_size": 16384, "eos_token_id": 2}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("olmo2", **shape), dtype=torch.bfloat16)
        total = sum(parameter.nbytes for parameter in model.parameters())
        model.save_pretrained(folder)
        del model
        print(f"checkpoint: {total / 1e6:.1f} MB, {given.ranks} ranks")
        context = multiprocessing.get_context("spawn")
        for way in ("whole", "shares"):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                port = free.getsockname()[1]
            results = context.Queue()
            arguments = [(rank, given.ranks, port, folder, way, results) for rank in range(given.ranks)]
            started = [context.Process(target=rank_of, args=of_rank) for of_rank in arguments]
            for process in started:
                process.start()
            for rank, read, own, mapped in sorted(results.get() for _ in started):
                read_words = "the whole checkpoint" if read is None else f"{read / 1e6:.1f} MB"
                rose = f"{own / 1e6:.1f} MB of its own and {mapped / 1e6:.1f} MB of mapped files"
                print(f"{way}: rank {rank} read {read_words}; resident memory rose by {rose}")
            for process in started:
                process.join()


if __name__ == "__main__":
    main()
