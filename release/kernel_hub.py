"""The package as Hugging Face's `kernels` loads it, from this folder or from a repository on the Hub with its contents.

    python -m release.kernel_hub dist/kernel_hub

    dist/kernel_hub/LICENSE
    dist/kernel_hub/build/torch-universal/metadata.json   the build's name and its id
                                          flce_ops/       the package; _ops.py has a namespace that is this id

    kernels.get_local_kernel(Path("dist/kernel_hub")).linear_cross_entropy(hidden, weight, target)

`kernels` imports the package under the id. A process can therefore hold several builds, and an installed flce_ops
beside them: modules and operators of each have names of their own. The id is a digest of the sources.
"""

import argparse
import hashlib
import json
import shutil
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
NAME = "flce-ops"
INTERFACE = 1  # what `kernels.get_kernel(repository, version=1)` asks for: another one where a public name goes away
VARIANT = "torch-universal"  # any Python, torch, operating system and device: no compiled code

NAMESPACE = '''"""The namespace of the operators of this build, which `python -m release.kernel_hub` made."""

import torch

ops = torch.ops.{id}


def add_op_namespace_prefix(name: str) -> str:
    return f"{id}::{{name}}"
'''


def id_of(package: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(f"{path.relative_to(package)}\0".encode() + path.read_bytes() + b"\0")
    return f"_flce_ops_{digest.hexdigest()[:12]}"


def write_build(folder: Path, package: Path = ROOT / "flce_ops") -> str:
    """Writes the folder anew and returns the id of the build."""
    build_id, variant = id_of(package), folder / "build" / VARIANT
    if variant.exists():
        shutil.rmtree(variant)
    shutil.copytree(package, variant / "flce_ops", ignore=shutil.ignore_patterns("__pycache__"))
    (variant / "flce_ops" / "_ops.py").write_text(NAMESPACE.format(id=build_id))
    metadata = {
        "name": NAME,
        "id": build_id,
        "version": INTERFACE,
        "license": "BSD-3-Clause",
        "python-depends": [],
        "backend": {"type": "cpu"},
    }
    (variant / "metadata.json").write_text(json.dumps(metadata, indent=2) + "\n")
    shutil.copy(ROOT / "LICENSE", folder)
    return build_id


def main() -> None:
    parser = argparse.ArgumentParser("python -m release.kernel_hub", description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="where the build goes; one that is there is replaced")
    folder = parser.parse_args().folder
    print(f"{write_build(folder)} in {folder / 'build' / VARIANT}")


if __name__ == "__main__":
    main()
