#!/usr/bin/env bash
# Packs the libraries we compare with, for a GPU machine that has torch and triton but no package index.
#
#     bash benchmarks/bring_peers.sh OUT [NAME...]    needs pip and xz; all three take 10 minutes, nearly all compression
#     OUT/peers.tar.xz           Liger, CCE, TRL, verl, QuACK and the CUTLASS DSL: Linux x86-64, CUDA 13, Python 3.12; 52 MiB
#     OUT/peers_triton.tar.xz    Liger, CCE, TRL and verl alone, for any CUDA; under 4 MiB
#     the first two also hold the two files of torch's chunked F.linear_cross_entropy, as torch_linear_cross_entropy:
#     they are copied from the torch of PEERS_PYTHON (python3 when not set), 2.13 or later, and run under torch 2.11
#     OUT/peers_cutile.tar.xz    cuTile and its compiler, for liger_cutile; add it to one of the others; 50 MiB
#
# There:  tar xf peers.tar.xz -C /tmp; P=/tmp/site-packages; export PYTHONPATH=$P:$P/nvidia_cutlass_dsl/dsl_packages
# The folder's name matters: QuACK walks into libraries that do not lie in a folder called site-packages.
# TRL wants transformers, accelerate, pandas and pyarrow there; Liger's CuTe DSL wants cuda-python.
set -euo pipefail

PYTHON=3.12
# datasets, dill and multiprocess: TRL's backward imports its trainers' helpers.
TRITON_PEERS=(
  liger-kernel==0.8.5 cut-cross-entropy==25.1.1 trl==1.16.0 datasets==5.2.0 dill==0.4.1 multiprocess==0.70.19
  verl==0.9.1
)
CUTLASS_PEERS=(
  quack-kernels==0.6.5 einops==0.8.2 apache-tvm-ffi==0.1.15.post2 torch-c-dlpack-ext==0.1.5
  nvidia-cutlass-dsl-libs-core==4.7.0 nvidia-cutlass-dsl-libs-base==4.7.0 nvidia-cutlass-dsl-libs-cu13==4.7.0
)
# The three of NVIDIA's compiler must agree; 13.2 has no Hopper, 13.5 packs to 5 MiB more.
CUTILE_PEERS=(cuda-tile==1.7.0 nvidia-cuda-tileiras==13.3.36 nvidia-cuda-nvcc==13.3.73 nvidia-nvvm==13.3.73)

usage="usage: bash bring_peers.sh OUT [peers] [peers_triton] [peers_cutile]"
python=${PEERS_PYTHON:-python3}
mkdir -p "${1:?$usage}"
out=$(cd "$1" && pwd)
shift
wanted=" ${*:-peers_triton peers peers_cutile} "
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
site=$work/site-packages

fetch() {  # wheels for that machine, not for this one; unpacked as pip would, without running anything
  local wheels platforms=()
  wheels=$(mktemp -d -p "$work")
  for glibc in 2_12 2_17 2_24 2_28; do platforms+=(--platform "manylinux_${glibc}_x86_64"); done
  "$python" -m pip download --quiet --no-deps --only-binary=:all: --dest "$wheels" \
    --implementation cp --python-version "$PYTHON" --platform manylinux2014_x86_64 "${platforms[@]}" "$@"
  mkdir -p "$site"
  for wheel in "$wheels"/*.whl; do "$python" -m zipfile -e "$wheel" "$site"; done
}

copy_of_torch() {  # finds torch without importing it
  local modules package=$site/torch_linear_cross_entropy
  modules=$("$python" -c "from importlib.util import find_spec as f; print(f('torch').submodule_search_locations[0])")/nn/modules
  mkdir -p "$package"
  cp "$modules"/linear_cross_entropy.py "$modules"/linear_cross_entropy_options.py "$package"
  "$python" -c "import importlib.metadata as m; print(f'__version__ = {m.version(\"torch\")!r}')" > "$package/__init__.py"
}

# The x86 filter rewrites relative calls and the dictionary spans the largest library (181 MB): 52 MiB instead of 65.
pack() { tar c -C "$work" site-packages | xz --x86 --lzma2=preset=9,dict=256MiB > "$out/$1.tar.xz"; }

if [[ $wanted == *" peers_triton "* || $wanted == *" peers "* ]]; then
  fetch "${TRITON_PEERS[@]}"
  copy_of_torch
fi
if [[ $wanted == *" peers_triton "* ]]; then pack peers_triton; fi
if [[ $wanted == *" peers "* ]]; then
  fetch "${CUTLASS_PEERS[@]}"
  rm -rf "$site"/nvidia_cutlass_dsl/cu13/lib/stubs "$site"/nvidia_cutlass_dsl/dsl_packages/iket "$site"/tvm_ffi/3rdparty
  pack peers
fi
if [[ $wanted == *" peers_cutile "* ]]; then
  rm -rf "$site"
  fetch "${CUTILE_PEERS[@]}"
  cuda=$site/nvidia/cu13  # what remains of it: tileiras, ptxas, libnvvm
  find "$cuda/bin" -mindepth 1 ! -name tileiras ! -name ptxas -delete
  rm -rf "$cuda/nvvm" "$cuda/include"
  chmod +x "$cuda"/bin/*  # zipfile forgets it
  pack peers_cutile
fi
ls -l "$out"
