"""Packs the built program for machines without a compiler: a wheel, which pip installs, and an archive of plain files.

    cargo build --release
    python3 scripts/package.py [FOLDER] [--pipeline PATH]

The wheel has `pipeline` and the torch worker; what the worker needs is its extra `torch`. The archive has the program, its man pages and its completions. Both
run on Linux of the same processor with the same C library or a newer one: the wheel's name says which. Needs Python 3.11 and nothing else.
"""

import argparse
import base64
import gzip
import hashlib
import io
import platform
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAME = "pipeline_finetuning"
SHELLS = {
    "bash": "bash-completion/completions/pipeline",
    "zsh": "zsh/site-functions/_pipeline",
    "fish": "fish/vendor_completions.d/pipeline.fish",
}
# Of all files, so that the same ones give the same bytes: 1980, the first that a zip file can say.
TIME = 315532800


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, nargs="?", default=ROOT / "target/package")
    parser.add_argument("--pipeline", type=Path, default=ROOT / "target/release/pipeline", help="the program [default: target/release/pipeline]")
    options = parser.parse_args()
    program = options.pipeline
    if not program.is_file():
        sys.exit(f"`{program}` is not there: cargo build --release")
    said = subprocess.run([program, "--version"], capture_output=True, text=True)
    if said.returncode != 0:
        sys.exit(f"`{program}` does not run here: {said.stderr.strip()}")
    version, machine = said.stdout.split()[1], platform.machine()
    options.folder.mkdir(parents=True, exist_ok=True)
    tag = f"py3-none-manylinux_2_{newest_glibc(program)}_{machine}"
    made = {
        f"{NAME}-{version}-{tag}.whl": lambda path: write_wheel(path, program, version, tag),
        f"pipeline-{version}-{machine}-linux.tar.gz": lambda path: write_archive(path, program, version),
    }
    for name, write in made.items():
        path = options.folder / name
        part = path.with_suffix(".part")
        try:
            write(part)
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
        print(f"{path.stat().st_size / 2**20:7.1f} MiB  {path}")


def newest_glibc(program):
    """The minor version of the C library that the program needs: that of its newest symbol."""
    needed = {int(minor) for minor in re.findall(rb"GLIBC_2\.(\d+)", program.read_bytes())}
    if not needed:
        sys.exit(f"`{program}` is not linked with glibc, which is what a wheel can say")
    return max(needed)


def write_wheel(path, program, version, tag):
    """A wheel: https://packaging.python.org/specifications/binary-distribution-format/."""
    project = tomllib.loads((ROOT / "workers/torch/pyproject.toml").read_text())["project"]
    info = f"{NAME}-{version}.dist-info"
    extras = {"torch": project["dependencies"], "4bit": project["dependencies"] + project["optional-dependencies"]["4bit"]}
    metadata = [
        "Metadata-Version: 2.1",
        f"Name: {NAME.replace('_', '-')}",
        f"Version: {version}",
        "Summary: Fine-tunes language models from a file: a declared, cached, restartable pipeline",
        "License: Apache-2.0",
        f"Requires-Python: {project['requires-python']}",
        "Description-Content-Type: text/markdown",
        *(f"Provides-Extra: {extra}" for extra in extras),
        *(f'Requires-Dist: {needed}; extra == "{extra}"' for extra, all_needed in extras.items() for needed in all_needed),
    ]
    scripts = "".join(f"{name} = {entry}\n" for name, entry in project["scripts"].items())
    source = ROOT / "workers/torch/src"
    worker = [file for file in sorted(source.rglob("*")) if file.suffix in (".py", ".json") or file.name == "py.typed"]
    files = [(str(file.relative_to(source)), file.read_bytes(), 0o644) for file in worker]
    files += [
        (f"{NAME}-{version}.data/scripts/pipeline", program.read_bytes(), 0o755),
        (f"{info}/METADATA", ("\n".join(metadata) + "\n\n" + (ROOT / "README.md").read_text()).encode(), 0o644),
        (f"{info}/WHEEL", f"Wheel-Version: 1.0\nGenerator: pipeline\nRoot-Is-Purelib: false\nTag: {tag}\n".encode(), 0o644),
        (f"{info}/entry_points.txt", f"[console_scripts]\n{scripts}".encode(), 0o644),
        (f"{info}/LICENSE", (ROOT / "LICENSE").read_bytes(), 0o644),
    ]
    record = "".join(f"{name},sha256={urlsafe_sha256(content)},{len(content)}\n" for name, content, _ in files)
    files.append((f"{info}/RECORD", (record + f"{info}/RECORD,,\n").encode(), 0o644))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for name, content, mode in files:
            entry = zipfile.ZipInfo(name)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o100000 | mode) << 16
            wheel.writestr(entry, content)


def urlsafe_sha256(content):
    return base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()


def write_archive(path, program, version):
    """`bin`, `share/man` and the completions of shells, to be unpacked over /usr/local or ~/.local."""
    with (
        tempfile.TemporaryDirectory() as folder,
        gzip.GzipFile(path, "wb", compresslevel=6, mtime=TIME) as packed,
        tarfile.open(fileobj=packed, mode="w") as archive,
    ):

        def add(name, content, mode=0o644):
            entry = tarfile.TarInfo(f"pipeline-{version}/{name}")
            entry.size, entry.mode, entry.mtime = len(content), mode, TIME
            archive.addfile(entry, io.BytesIO(content))

        add("bin/pipeline", program.read_bytes(), 0o755)
        add("share/doc/pipeline/LICENSE", (ROOT / "LICENSE").read_bytes())
        subprocess.run([program, "man", folder], check=True, stdout=subprocess.DEVNULL)
        for page in sorted(Path(folder).iterdir()):
            add(f"share/man/man1/{page.name}", page.read_bytes())
        for shell, place in SHELLS.items():
            add(f"share/{place}", subprocess.run([program, "completions", shell], check=True, capture_output=True).stdout)


if __name__ == "__main__":
    main()
