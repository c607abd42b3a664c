#!/usr/bin/env python3
"""The same graphs through several engines: DVC, Snakemake, turbo, moon and pipeline, side by side.

    pip install dvc snakemake; npm i turbo @moonrepo/cli
    python3 benches/engines.py [--stages 10] [--rounds 5] [--only pipeline,dvc] [--folder DIR] [--limit 300]

Engines are taken from PATH; one that is not there is left out, and said so. The graph is lanes of chained stages (2 lanes up to 99 stages, else 10), each of
which copies a file and adds a line of its own: what is timed is the engine. Rounds of all engines are interleaved, so that a machine that is busy for a while is so
for all. Printed are the median and the least of wall and CPU time (with all processes that were waited for), the peak memory of one process, and, of CPU
time, the ratio to `pipeline`.

    cold           every stage runs
    no-op          the same command again
    dry run        what would run, with every stage's result there
    one leaf       the source of one lane's last stage is changed
    bad file       a file with an unknown key or name in it is rejected
"""

import argparse
import dataclasses
import json
import os
import pathlib
import re
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator

Cell = tuple[int, int]


@dataclasses.dataclass
class Graph:
    stages: int

    @property
    def lanes(self) -> int:
        return 2 if self.stages < 100 else 10

    @property
    def length(self) -> int:
        return self.stages // self.lanes

    def cells(self) -> Iterator[Cell]:
        return ((lane, step) for lane in range(self.lanes) for step in range(self.length))

    def last(self) -> list[Cell]:
        return [(lane, self.length - 1) for lane in range(self.lanes)]


def made(cell: Cell) -> str:
    return f"out/{cell[0]}_{cell[1]}.txt"


def source(cell: Cell) -> str:
    lane, step = cell
    return made((lane, step - 1)) if step else f"data/{lane}.txt"


def extra(cell: Cell) -> str:
    """What the stage adds: a file of its own, which `one leaf` changes."""
    return f"data/{cell[0]}_{cell[1]}.txt"


def shell(cell: Cell) -> str:
    return f"mkdir -p out && cat {source(cell)} {extra(cell)} > {made(cell)}"


def write_pipeline(graph: Graph, folder: pathlib.Path) -> None:
    lines = ["version: 1", "stages:"]
    for lane, step in graph.cells():
        files = f"add: ./{extra((lane, step))}" + ("" if step else f", before: ./{source((lane, step))}")
        inputs = f"inputs: {{ before: s_{lane}_{step - 1} }}, " if step else ""
        before = "$INPUT_before/file" if step else "$FILE_before"
        lines += [
            f"  s_{lane}_{step}:",
            "    uses: command",
            f"    with: {{ run: 'cat {before} $FILE_add > $OUTPUT_out/file', {inputs}files: {{ {files} }}, outputs: {{ out: files }} }}",
        ]
    (folder / "pipeline.yaml").write_text("\n".join(lines) + "\n")


def write_dvc(graph: Graph, folder: pathlib.Path) -> None:
    lines = ["stages:"]
    for cell in graph.cells():
        lines += [f"  s_{cell[0]}_{cell[1]}:", f"    cmd: {shell(cell)}", f"    deps: [{source(cell)}, {extra(cell)}]", f"    outs: [{made(cell)}]"]
    (folder / "dvc.yaml").write_text("\n".join(lines) + "\n")
    subprocess.run(["dvc", "init", "-q", "--no-scm", "-f"], cwd=folder, check=True, env=ENVIRONMENT)


def write_snakemake(graph: Graph, folder: pathlib.Path) -> None:
    rules = ["rule all:\n    input: " + ", ".join(repr(made(cell)) for cell in graph.last())]
    for cell in graph.cells():
        inputs = f"{source(cell)!r}, {extra(cell)!r}"
        rules.append(f"rule s_{cell[0]}_{cell[1]}:\n    input: {inputs}\n    output: {made(cell)!r}\n    shell: 'cat {{input}} > {{output}}'")
    (folder / "Snakefile").write_text("\n\n".join(rules) + "\n")


def write_turbo(graph: Graph, folder: pathlib.Path) -> None:
    """A package for each stage, which is turbo's unit of work; a package cannot read another's files by path, so it reads its own."""
    root = {"name": "b", "private": True, "packageManager": "npm@10.0.0", "workspaces": ["p/*"]}
    (folder / "package.json").write_text(json.dumps(root))
    (folder / "turbo.json").write_text(json.dumps({"tasks": {"build": {"dependsOn": ["^build"], "outputs": ["out/**"]}}}))
    (folder / ".gitignore").write_text("out/\n.turbo/\nnode_modules/\n")
    packages: dict[str, object] = {"": {"name": "b", "workspaces": ["p/*"]}}
    for lane, step in graph.cells():
        name = f"s-{lane}-{step}"
        needs = {f"s-{lane}-{step - 1}": "*"} if step else {}
        package = {"name": name, "version": "0.0.0", "dependencies": needs}
        packages |= {f"p/{name}": package, f"node_modules/{name}": {"resolved": f"p/{name}", "link": True}}
        (folder / "p" / name).mkdir(parents=True)
        (folder / "p" / name / "add.txt").write_text(f"line {lane} {step}\n")
        scripts = {"build": "mkdir -p out && cat add.txt > out/o.txt"}
        (folder / "p" / name / "package.json").write_text(json.dumps(package | {"scripts": scripts}))
    lock = {"name": "b", "lockfileVersion": 3, "requires": True, "packages": packages}
    (folder / "package-lock.json").write_text(json.dumps(lock))
    commit(folder)


def write_moon(graph: Graph, folder: pathlib.Path) -> None:
    (folder / ".moon").mkdir()
    (folder / ".moon/workspace.yml").write_text("projects: {root: '.'}\nvcs: {defaultBranch: master}\ntelemetry: false\n")
    (folder / ".gitignore").write_text("out/\n.moon/cache/\n")
    lines = ["tasks:"]
    for cell in graph.cells():
        lane, step = cell
        inputs = f"    inputs: ['/{source(cell)}', '/{extra(cell)}']"
        lines += [f"  s-{lane}-{step}:", f"    script: {json.dumps(shell(cell))}", inputs, f"    outputs: ['/{made(cell)}']"]
        lines += [f"    deps: ['~:s-{lane}-{step - 1}']"] if step else []
    last = ", ".join(f"'~:s-{lane}-{step}'" for lane, step in graph.last())
    lines += ["  all:", "    command: noop", f"    deps: [{last}]"]
    (folder / "moon.yml").write_text("\n".join(lines) + "\n")
    commit(folder)


def commit(folder: pathlib.Path) -> None:
    for command in (["init", "-q", "-b", "master"], ["add", "-A"], ["-c", "user.name=b", "-c", "user.email=b@b", "commit", "-qm", "b"]):
        subprocess.run(["git", *command], cwd=folder, check=True)


@dataclasses.dataclass
class Engine:
    name: str
    write: Callable[[Graph, pathlib.Path], None]
    run: list[str]
    dry: list[str]
    # What of the folder is removed before everything runs.
    state: list[str]
    # The file that is made wrong, and what is put there in the place of what.
    wrong: tuple[str, str, str]
    # What tells of a bad file soonest.
    check: list[str]

    def leaf(self, graph: Graph) -> str:
        lane, step = graph.last()[0]
        return f"p/s-{lane}-{step}/add.txt" if self.name == "turbo" else extra((lane, step))


# A home of its own: a folder above may have one.
OURS = ["pipeline", "--home", "home"]

ENGINES = [
    Engine("pipeline", write_pipeline, [*OURS, "run", "-q", "pipeline.yaml"], [*OURS, "plan", "pipeline.yaml"], ["home"],
           ("pipeline.yaml", "    uses: command", "    usse: command"), [*OURS, "validate", "pipeline.yaml"]),
    Engine("dvc", write_dvc, ["dvc", "repro", "-q"], ["dvc", "repro", "--dry"], ["out", "dvc.lock", ".dvc/cache"],
           ("dvc.yaml", "    outs:", "    otus:"), ["dvc", "repro", "--dry"]),
    Engine("snakemake", write_snakemake, ["snakemake", "-q", "all", "-c2"], ["snakemake", "-n"], ["out", ".snakemake"],
           ("Snakefile", "    output:", "    otuput:"), ["snakemake", "-n"]),
    Engine("turbo", write_turbo, ["turbo", "run", "build", "--output-logs=none", "--ui=stream"], ["turbo", "run", "build", "--dry=json"],
           [".turbo", "node_modules/.cache"], ("turbo.json", "dependsOn", "depndsOn"), ["turbo", "run", "build", "--dry=json"]),
    Engine("moon", write_moon, ["moon", "run", "root:all", "--quiet"], ["moon", "task-graph", "--json"], ["out", ".moon/cache"],
           ("moon.yml", "    outputs:", "    otuputs:"), ["moon", "task-graph", "--json"]),
]  # fmt: skip

ENVIRONMENT = os.environ | {
    "DVC_NO_ANALYTICS": "1", "TURBO_TELEMETRY_DISABLED": "1", "DO_NOT_TRACK": "1", "MOON_TELEMETRY": "false", "DVC_SITE_CACHE_DIR": "",
}  # fmt: skip


@dataclasses.dataclass
class Figures:
    wall: list[float] = dataclasses.field(default_factory=list)
    cpu: list[float] = dataclasses.field(default_factory=list)
    memory: int = 0
    failed: str | None = None


def measure(command: list[str], folder: pathlib.Path, limit: float, figures: Figures, succeeds: bool) -> None:
    if figures.failed:
        return
    with tempfile.TemporaryFile() as log:
        began = time.monotonic()
        process = subprocess.Popen(command, cwd=folder, env=ENVIRONMENT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        while not (waited := os.wait4(process.pid, os.WNOHANG))[0]:
            if time.monotonic() - began > limit:
                process.kill()
                figures.failed = f"> {limit:.0f} s"
            time.sleep(0.0005)
        _, status, usage = waited
        process.returncode = os.waitstatus_to_exitcode(status)
        if figures.failed:
            return
        if (process.returncode == 0) != succeeds:
            log.seek(0)
            figures.failed = f"exit {process.returncode}"
            print(f"{' '.join(command)}: exit {process.returncode}\n{log.read().decode(errors='replace')[-400:]}")
            return
        figures.wall.append(time.monotonic() - began)
        figures.cpu.append(usage.ru_utime + usage.ru_stime)
        figures.memory = max(figures.memory, usage.ru_maxrss)


CASES = ["cold", "no-op", "dry run", "one leaf", "bad file"]


def round_of(engine: Engine, graph: Graph, folder: pathlib.Path, limit: float, figures: dict[str, Figures]) -> None:
    for path in engine.state:
        entry = folder / path
        shutil.rmtree(entry) if entry.is_dir() else entry.unlink(missing_ok=True)
    for built in folder.glob("p/*/out"):
        shutil.rmtree(built)
    measure(engine.run, folder, limit, figures["cold"], succeeds=True)
    if figures["cold"].failed:
        for case in CASES[1:4]:
            figures[case].failed = "no cold run"
    measure(engine.run, folder, limit, figures["no-op"], succeeds=True)
    measure(engine.dry, folder, limit, figures["dry run"], succeeds=True)
    leaf = folder / engine.leaf(graph)
    leaf.write_text(leaf.read_text() + "another\n")
    measure(engine.run, folder, limit, figures["one leaf"], succeeds=True)
    name, right, wrong = engine.wrong
    text = (folder / name).read_text()
    (folder / name).write_text(text.replace(right, wrong, 1))
    measure(engine.check, folder, limit, figures["bad file"], succeeds=False)
    (folder / name).write_text(text)


def version(engine: Engine) -> str:
    said = subprocess.run([engine.run[0], "--version"], env=ENVIRONMENT, capture_output=True, text=True, check=False).stdout
    found = re.search(r"\d+\.\d+\S*", said)
    return found[0] if found else "?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", default=",".join(engine.name for engine in ENGINES))
    parser.add_argument("--folder")
    parser.add_argument("--limit", type=float, default=300)
    options = parser.parse_args()
    graph = Graph(options.stages)
    chosen = [engine for engine in ENGINES if engine.name in options.only.split(",")]
    for engine in chosen:
        if not shutil.which(engine.run[0]):
            print(f"{engine.name} is not in PATH, and left out")
    chosen = [engine for engine in chosen if shutil.which(engine.run[0])]
    with tempfile.TemporaryDirectory(dir=options.folder) as root:
        figures = {engine.name: {case: Figures() for case in CASES} for engine in chosen}
        folders = {}
        for engine in chosen:
            folder = folders[engine.name] = pathlib.Path(root) / engine.name
            (folder / "data").mkdir(parents=True)
            for lane in range(graph.lanes):
                (folder / f"data/{lane}.txt").write_text(f"source {lane}\n")
            for cell in graph.cells():
                (folder / extra(cell)).write_text(f"line {cell}\n")
            engine.write(graph, folder)
        for _ in range(options.rounds):
            for engine in chosen:
                round_of(engine, graph, folders[engine.name], options.limit, figures[engine.name])
    print(f"\n{options.stages} stages, {options.rounds} rounds, load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("| | | wall, median (least) | CPU, median (least) | CPU, ratio | peak memory |\n|---|---|---|---|---|---|")
    versions = {engine.name: f"{engine.name} {version(engine)}" for engine in chosen}
    for case in CASES:
        ours = figures.get("pipeline", {}).get(case)
        for engine in chosen:
            of = figures[engine.name][case]
            label = f"| {case} | {versions[engine.name]} "
            if of.failed or not of.wall:
                print(f"{label}| {of.failed or '–'} | | | |")
                continue
            ratio = f"{min(of.cpu) / min(ours.cpu):.1f}" if ours and ours.cpu else ""
            shown = [f"{1000 * statistics.median(times):.0f} ms ({1000 * min(times):.0f})" for times in (of.wall, of.cpu)]
            print(f"{label}| {shown[0]} | {shown[1]} | {ratio} | {of.memory / 1024:.0f} MiB |")


if __name__ == "__main__":
    main()
