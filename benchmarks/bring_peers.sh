#!/usr/bin/env bash
# Packs the libraries we compare with, for a GPU machine that has torch and triton but no package index.
#
#     bash benchmarks/bring_peers.sh OUT              3 to 5 minutes, most of it compression; needs pip and xz
#     OUT/peers.tar.xz           Liger, CCE, QuACK and the CUTLASS DSL: Linux x86-64, CUDA 13, Python 3.12; 52 MiB
#     OUT/peers_triton.tar.xz    Liger and CCE alone, which any Python and any CUDA can import; under 1 MiB
#
# There:  tar xf peers.tar.xz -C /tmp; P=/tmp/site-packages; export PYTHONPATH=$P:$P/nvidia_cutlass_dsl/dsl_packages
# The folder's name matters: QuACK walks into libraries that do not lie in a folder called site-packages.
set -euo pipefail

PYTHON=3.12
TRITON_PEERS=(liger-kernel==0.8.5 cut-cross-entropy==25.1.1)
CUTLASS_PEERS=(
  quack-kernels==0.6.5 einops==0.8.2 apache-tvm-ffi==0.1.15.post2 torch-c-dlpack-ext==0.1.5
  nvidia-cutlass-dsl-libs-core==4.7.0 nvidia-cutlass-dsl-libs-base==4.7.0 nvidia-cutlass-dsl-libs-cu13==4.7.0
)

mkdir -p "${1:?usage: bash bring_peers.sh OUT}"
out=$(cd "$1" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
site=$work/site-packages
mkdir "$site"

fetch() {  # wheels for that machine, not for this one; unpacked as pip would, without running anything
  local wheels
  wheels=$(mktemp -d -p "$work")
  python3 -m pip download --quiet --no-deps --only-binary=:all: --dest "$wheels" \
    --implementation cp --python-version "$PYTHON" \
    --platform manylinux2014_x86_64 --platform manylinux_2_17_x86_64 --platform manylinux_2_24_x86_64 \
    --platform manylinux_2_28_x86_64 "$@"
  for wheel in "$wheels"/*.whl; do python3 -m zipfile -e "$wheel" "$site"; done
}

# The x86 filter rewrites relative calls and the dictionary spans the largest library (181 MB): 52 MiB instead of 65.
pack() { tar c -C "$work" site-packages | xz --x86 --lzma2=preset=9,dict=256MiB > "$out/$1"; }

fetch "${TRITON_PEERS[@]}"
pack peers_triton.tar.xz
fetch "${CUTLASS_PEERS[@]}"
rm -rf "$site"/nvidia_cutlass_dsl/cu13/lib/stubs "$site"/nvidia_cutlass_dsl/dsl_packages/iket "$site"/tvm_ffi/3rdparty
pack peers.tar.xz
ls -l "$out"
