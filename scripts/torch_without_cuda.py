"""Lets torch as PyPI has it, built for CUDA, be imported without NVIDIA's libraries.

They are 4 GB, of which a machine without a GPU needs nothing but that they can be loaded. This writes, beside the
libraries of the torch that is installed with this Python, empty ones of the same names, whose functions have the names
and versions that torch links to and say that there is no device:

    pip install --no-deps torch && pip install pyelftools && python scripts/torch_without_cuda.py

For tests on the processor alone. Needs a C compiler.
"""

import collections
import re
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

from elftools.elf.elffile import ELFFile
from elftools.elf.gnuversions import GNUVerNeedSection

NVIDIA = re.compile(r"lib(cu|nv|nccl)")

# Symbols that are asked for without a version: whose they are shows in their names.
UNVERSIONED = re.compile(r"(cu|nv|nccl|CUpti|__cuda|cupti)")

# These return pointers, which are followed; every other function returns a number: 100 is "no device".
POINTERS = re.compile(r"__cudaRegisterFatBinary|Get(Last)?Error(String|Name)|GetStatus(String|Name)|_result_get")


class Needs:
    """What the libraries of torch ask of others."""

    def __init__(self) -> None:
        self.libraries: set[str] = set()
        self.defined: set[str] = set()
        self.unversioned: set[str] = set()
        # Of each library its versions, and the functions of each.
        self.versions: dict[str, dict[str, set[str]]] = collections.defaultdict(lambda: collections.defaultdict(set))

    def read(self, path: Path) -> None:
        """Adds those of one library."""
        with path.open("rb") as file:
            elf = ELFFile(file)
            dynamic, symbols = elf.get_section_by_name(".dynamic"), elf.get_section_by_name(".dynsym")
            if dynamic is None:
                return
            self.libraries |= {tag.needed for tag in dynamic.iter_tags("DT_NEEDED")}
            of_index = {}
            for section in elf.iter_sections():
                if isinstance(section, GNUVerNeedSection):
                    for library, versions in section.iter_versions():
                        for version in versions:
                            of_index[version["vna_other"]] = self.versions[library.name][version.name]
            indices = elf.get_section_by_name(".gnu.version")
            for number, symbol in enumerate(symbols.iter_symbols()):
                index = indices.get_symbol(number)["ndx"] if indices else None
                if symbol["st_shndx"] != "SHN_UNDEF":
                    self.defined.add(symbol.name)
                elif index in of_index:
                    of_index[index].add(symbol.name)
                elif symbol["st_info"]["bind"] == "STB_GLOBAL" and UNVERSIONED.match(symbol.name):
                    self.unversioned.add(symbol.name)


def function(name: str) -> str:
    """A function that does nothing."""
    return (
        f"void *{name}(void) {{ return nothing; }}" if POINTERS.search(name) else f"long {name}(void) {{ return 100; }}"
    )


def write(library: Path, versions: dict[str, set[str]], unversioned: set[str]) -> None:
    """Writes one library."""
    functions = sorted(unversioned.union(*versions.values()))
    with tempfile.TemporaryDirectory() as folder:
        source, script = Path(folder, "source.c"), Path(folder, "versions")
        source.write_text("\n".join(["static char nothing[4096];", *map(function, functions)]))
        command = ["cc", "-w", "-shared", "-fPIC", "-o", library, source, f"-Wl,-soname,{library.name}"]
        if versions:
            exported = [
                f"{version} {{ global: {' '.join(f'{name};' for name in names)} }};"
                for version, names in versions.items()
            ]
            script.write_text("\n".join(exported))
            command.append(f"-Wl,--version-script={script}")
        subprocess.run(command, check=True)


def main() -> None:
    """Writes what the torch of this Python lacks."""
    folder = Path(sysconfig.get_paths()["purelib"], "torch", "lib")
    own = [path for path in folder.glob("*.so*") if not NVIDIA.match(path.name)]
    if not own:
        sys.exit(f"no torch in {folder}")
    needs = Needs()
    for path in own:
        needs.read(path)
    missing = sorted(name for name in needs.libraries - {path.name for path in own} if NVIDIA.match(name))
    # Which library has the functions without a version does not matter, since all are loaded.
    unversioned = needs.unversioned - needs.defined
    for number, name in enumerate(missing):
        write(folder / name, needs.versions.get(name, {}), unversioned if number == 0 else set())
    print(f"{len(missing)} libraries in {folder}")


if __name__ == "__main__":
    main()
