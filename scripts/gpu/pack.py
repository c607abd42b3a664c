"""Packs what a machine with a GPU and without a network may lack, into a folder of a few dozen megabytes: the program, compressed, and wheels.

    python3 scripts/gpu/pack.py target/gpu [--python 3.12] [--cuda 130]

There: `xz -dk pipeline.xz`, `python3 -m pip install --no-index --no-deps --target site *.whl` with `site` in PYTHONPATH, and `torchtune/*.whl` into another
folder, which `speed.py --torchtune` names: PEFT refuses to work beside torchtune's torchao. torch, transformers, PEFT and pyarrow are the machine's own. Of
bitsandbytes the wheel keeps the library of one CUDA; of the program the one that scripts/build-cuda.sh has built is taken where it is there, which computes
natively on NVIDIA's devices, too.
"""

import argparse
import lzma
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from common import ROOT

WHEELS = ["trl==1.16.0", "bitsandbytes==0.50.2"]
# What torchtune's recipe imports and torch does not bring. torchtune 0.6.1 is the last release, torchao 0.13 the last that it works with.
OF_TORCHTUNE = ["torchtune==0.6.1", "torchao==0.13.0", "torchdata==0.11.0", "omegaconf==2.3.0", "datasets", "multiprocess", "dill", "xxhash", "tiktoken",
                "blobfile", "sentencepiece", "kagglehub"]  # fmt: skip
# Only as source; pure Python.
SOURCES = ["antlr4-python3-runtime==4.9.3"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="the version there")
    parser.add_argument("--cuda", default="130", help="as bitsandbytes names its libraries")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    pip = [sys.executable, "-m", "pip"]
    platforms = [f"--platform=manylinux_2_{minor}_x86_64" for minor in (17, 24, 27, 28)] + ["--platform=manylinux2014_x86_64"]
    there = ["--only-binary=:all:", f"--python-version={options.python}", "--implementation=cp", *platforms]
    torchtune = options.folder / "torchtune"
    for folder, wheels in ((options.folder, WHEELS), (torchtune, OF_TORCHTUNE)):
        subprocess.run([*pip, "download", "--quiet", "--no-deps", *there, "--dest", folder, *wheels], check=True)
    subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", torchtune, *SOURCES], check=True)
    for wheel in options.folder.glob("bitsandbytes-*.whl"):
        keep_one_library(wheel, f"libbitsandbytes_cuda{options.cuda}.so")
    built = [ROOT / "target/cuda/release/pipeline", ROOT / "target/release/pipeline"]
    program = next((program for program in built if program.is_file()), None)
    if program is None:
        sys.exit("no program is built: `cargo build --release`, or scripts/build-cuda.sh")
    with open(program, "rb") as source, lzma.open(options.folder / "pipeline.xz", "wb", preset=9) as packed:
        shutil.copyfileobj(source, packed)
    sizes = sorted((file.stat().st_size, file.name) for file in options.folder.rglob("*") if file.is_file())
    for size, name in sizes:
        print(f"{size / 2**20:7.1f} MiB  {name}")
    print(f"{sum(size for size, _ in sizes) / 2**20:7.1f} MiB  in all; the program is {program.relative_to(ROOT)}")


def keep_one_library(wheel, library):
    """Writes a wheel anew without the native libraries of other devices."""
    smaller = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as whole, zipfile.ZipFile(smaller, "w", zipfile.ZIP_DEFLATED) as kept:
        names = [Path(entry.filename).name for entry in whole.infolist()]
        if library not in names:
            sys.exit(f"{wheel.name} has no {library}: {', '.join(name for name in names if name.endswith('.so'))}")
        for entry in whole.infolist():
            if not entry.filename.endswith(".so") or Path(entry.filename).name in (library, "libbitsandbytes_cpu.so"):
                kept.writestr(entry, whole.read(entry))
    smaller.rename(wheel)


if __name__ == "__main__":
    main()
