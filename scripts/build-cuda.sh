#!/usr/bin/env bash
# Builds `pipeline` with kernels for NVIDIA GPUs, on a machine without CUDA, driver or GPU: x86-64 Linux with a C++ compiler, Python and the network.
#
#   scripts/build-cuda.sh                        # target/cuda/release/pipeline
#   CUDA_COMPUTE_CAP=90 scripts/build-cuda.sh    # for H100 and H200 alone; default 80: Ampere and newer
#   scripts/build-cuda.sh test -p model --test numbers     # any cargo command in place of `build`
#
# nvcc 13.0 and what it needs come from PyPI into target/cuda/toolkit (0.3 GB). NVIDIA's libraries are not linked but opened at the first call
# (scripts/lazy_cuda.py), so the program starts on every machine, and computes on the processor where there is no GPU. docs/cuda.md says what
# a machine needs that has one.
set -euo pipefail
cd "$(dirname "$0")/.."

target=${CARGO_TARGET_DIR:-$PWD/target/cuda}
toolkit=$target/toolkit
nvcc_version=13.0

if [ "$(uname -sm)" != "Linux x86_64" ]; then
    echo "this script is for x86-64 Linux: elsewhere install CUDA 13 and use \`cargo build --release --features cuda\`" >&2
    exit 3
fi

if [ ! -x "$toolkit/bin/nvcc" ]; then
    python3 -m venv "$target/python"
    "$target/python/bin/pip" install --quiet "cuda-toolkit[nvcc,cudart,cccl,crt,nvvm]==$nvcc_version.*"
    wheels=$(readlink -f "$target"/python/lib/python3*/site-packages/nvidia/cu13)
    mkdir -p "$toolkit"
    # The compiler looks beside itself for its parts; links keep the wheels as they are.
    cp -rs "$wheels"/. "$toolkit"/
    ln -sfn lib "$toolkit/lib64"
    # What is linked lies in lib/stubs alone: no shared library is found before the archives there.
    mkdir -p "$toolkit/lib/stubs"
    cp -L "$toolkit/lib/libcudart_static.a" "$toolkit/lib/stubs/libcudart.a"
fi
python3 scripts/lazy_cuda.py "$toolkit/lib/stubs"

export CUDA_HOME=$toolkit
export PATH=$toolkit/bin:$PATH
export CUDA_COMPUTE_CAP=${CUDA_COMPUTE_CAP:-80}
export CARGO_TARGET_DIR=$target
command=${1:-build}
[ $# -gt 0 ] && shift
cargo "$command" --release --features nccl "$@"

program=$target/release/pipeline
if [ "$command" = build ] && needed=$(readelf -d "$program" | grep -E 'NEEDED.*lib(cu|nv|nccl)'); then
    echo "the program would not start without NVIDIA's libraries:" >&2
    echo "$needed" >&2
    exit 1
fi
