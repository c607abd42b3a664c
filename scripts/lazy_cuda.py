#!/usr/bin/env python3
"""Archives to link in place of NVIDIA's libraries, so that a program built for CUDA starts where they are missing.

    lazy_cuda.py OUT          # in the repository; writes libcuda.a, libcublas.a, … into OUT

candle links against libcuda, libcublas, libcurand and others by name, and a program linked so does not start on a machine without a driver. Each
function of these archives looks its library up at the first call (`dlopen`, `dlsym`) and goes there from then on; where the library, or the function
in it, is missing it returns the error that the library itself has for that. The names are those that cudarc declares: it is through cudarc
that candle calls. x86-64 and ELF alone.
"""

import json
import pathlib
import re
import subprocess
import sys

CUDA_MAJOR = 13

# The archive; cudarc's module; the file to open; the prefix of its functions; what a missing library returns.
LIBRARIES = [
    ("cuda", "driver", "libcuda.so.1", "cu", 100),  # CUDA_ERROR_NO_DEVICE
    ("cublas", "cublas", f"libcublas.so.{CUDA_MAJOR}", "cublas", 1),  # CUBLAS_STATUS_NOT_INITIALIZED
    ("cublasLt", "cublaslt", f"libcublasLt.so.{CUDA_MAJOR}", "cublasLt", 1),
    ("curand", "curand", "libcurand.so.10", "curand", 203),  # CURAND_STATUS_INITIALIZATION_FAILED
    ("nvrtc", "nvrtc", f"libnvrtc.so.{CUDA_MAJOR}", "nvrtc", 6),  # NVRTC_ERROR_INVALID_OPTION
    ("nccl", "nccl", "libnccl.so.2", "p?nccl", 2),  # ncclSystemError
]

# An entry without an address yet pushes its number and goes to `resolve`, which saves every register that can hold an argument, asks for the
# address and goes there with all of them restored: the callee sees the call as it was made.
ASSEMBLY = """
    .text
resolve:
    push %rdi
    push %rsi
    push %rdx
    push %rcx
    push %r8
    push %r9
    push %rax                       # how many vector registers a variadic call uses
    sub $136, %rsp                  # eight of 16 bytes, and 8 for the alignment that a call needs
{save}
    mov 192(%rsp), %rdi             # the number, below the seven pushed
    call lazy_{name}_address
    mov %rax, %r11
{restore}
    add $136, %rsp
    pop %rax
    pop %r9
    pop %r8
    pop %rcx
    pop %rdx
    pop %rsi
    pop %rdi
    add $8, %rsp                    # the number
    jmp *%r11

    .macro entry function number
    .globl \\function
    .type \\function, @function
\\function:
    mov lazy_{name}_addresses + 8 * \\number(%rip), %r11
    test %r11, %r11
    jz 1f
    jmp *%r11
1:  push $\\number
    jmp resolve
    .size \\function, . - \\function
    .endm

{entries}

    .section .note.GNU-stack, "", @progbits
"""

LOOK_UP = """
#define _GNU_SOURCE
#include <dlfcn.h>

static const char *const names[] = {{{names}}};
__attribute__((visibility("hidden"))) void *lazy_{name}_addresses[{count}];

static long missing(void) {{ return {error}; }}

__attribute__((visibility("hidden"))) void *lazy_{name}_address(long number) {{
    static void *library;
    if (!library) library = dlopen("{file}", RTLD_NOW | RTLD_GLOBAL);
    void *found = library ? dlsym(library, names[number]) : 0;
    /* Not kept: LD_LIBRARY_PATH is fixed, but a library may be opened by somebody else later. */
    if (!found) return (void *)missing;
    return lazy_{name}_addresses[number] = found;
}}
"""


def cudarc():
    """The folder of the sources that this build uses."""
    command = ["cargo", "metadata", "--format-version", "1", "--features", "nccl", "--filter-platform", "x86_64-unknown-linux-gnu"]
    packages = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)["packages"]
    [manifest] = [package["manifest_path"] for package in packages if package["name"] == "cudarc"]
    return pathlib.Path(manifest).parent


def functions(folder, module, prefix):
    text = "".join(path.read_text() for path in sorted((folder / "src" / module / "sys").rglob("*.rs")))
    return sorted(set(re.findall(rf"\bfn ({prefix}[A-Z]\w*)", text)))


def archive(out, name, file, error, names):
    vectors = range(8)
    save = "\n".join(f"    movups %xmm{at}, {16 * at}(%rsp)" for at in vectors)
    restore = "\n".join(f"    movups {16 * at}(%rsp), %xmm{at}" for at in vectors)
    entries = "\n".join(f"    entry {function} {number}" for number, function in enumerate(names))
    assembly = ASSEMBLY.format(name=name, save=save, restore=restore, entries=entries)
    quoted = ", ".join(f'"{function}"' for function in names)
    look_up = LOOK_UP.format(name=name, file=file, error=error, names=quoted, count=len(names))
    (out / f"{name}_entries.s").write_text(assembly)
    (out / f"{name}_address.c").write_text(look_up)
    objects = []
    for source in (f"{name}_entries.s", f"{name}_address.c"):
        made = source.rsplit(".", 1)[0] + ".o"
        subprocess.run(["cc", "-O2", "-fPIC", "-c", source, "-o", made], check=True, cwd=out)
        objects.append(made)
    subprocess.run(["ar", "rcs", f"lib{name}.a", *objects], check=True, cwd=out)


def main():
    out = pathlib.Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    folder = cudarc()
    for name, module, file, prefix, error in LIBRARIES:
        names = functions(folder, module, prefix)
        if not names:
            sys.exit(f"{folder} declares no function of {file}: its layout is not the one known here")
        archive(out, name, file, error, names)
        print(f"lib{name}.a: {len(names)} functions of {file}")


main()
