"""The wheel and the sdist: what they hold, that they install and import by themselves."""

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import flce_ops

ROOT = Path(__file__).resolve().parent.parent
SOURCES = ["pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"]
FOLDERS = ["flce_ops", "tests", "examples", "benchmarks", "docs"]


def version_of(distribution: str) -> int:
    try:
        return int(importlib.metadata.version(distribution).split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return 0


# the setuptools that pyproject.toml asks for; imported in the build's own process alone
pytestmark = pytest.mark.skipif(
    version_of("setuptools") < 77 or not version_of("pip"), reason="needs setuptools >= 77 and pip"
)


def build(hook: str, tree: Path, out: Path) -> Path:
    """setuptools' own build hook in a fresh process, as a frontend without isolation calls it."""
    script = f"from setuptools import build_meta; import sys; build_meta.{hook}(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", script, str(out)], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """(wheel, sdist, wheel made from the sdist); built in a copy, as setuptools leaves a build folder behind."""
    tree = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        shutil.copy(ROOT / name, tree)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    wheel = build("build_wheel", tree, tmp_path_factory.mktemp("wheel"))
    shutil.rmtree(tree / "build")
    sdist = build("build_sdist", tree, tmp_path_factory.mktemp("sdist"))
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
    (root,) = unpacked.iterdir()
    return wheel, sdist, build("build_wheel", root, tmp_path_factory.mktemp("again"))


def names_and_contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def package_files() -> set[str]:
    files = (ROOT / "flce_ops").rglob("*")
    return {str(f.relative_to(ROOT)) for f in files if f.suffix == ".py" or f.name == "py.typed"}


def test_the_wheel_holds_the_package_its_licence_and_nothing_else(built):
    names = set(names_and_contents(built[0]))
    info = f"flce_ops-{flce_ops.__version__}.dist-info/"
    assert "flce_ops/py.typed" in names
    assert {name for name in names if not name.startswith(info)} == package_files()
    assert {name.removeprefix(info) for name in names if name.startswith(info)} == {
        "METADATA",
        "RECORD",
        "WHEEL",
        "licenses/LICENSE",
        "top_level.txt",
    }


def test_the_sdist_holds_what_builds_the_wheel_and_no_tests(built):
    with tarfile.open(built[1]) as archive:
        files = {member.name.split("/", 1)[1] for member in archive.getmembers() if member.isfile()}
    made = {name for name in files if name.startswith("flce_ops.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert files - made == package_files() | set(SOURCES)


def test_the_wheel_from_the_sdist_is_the_same(built):
    assert names_and_contents(built[0]) == names_and_contents(built[2])


def test_the_metadata_has_the_version_the_extras_and_no_dependency_but_torch(built):
    metadata = next(text for name, text in names_and_contents(built[0]).items() if name.endswith("METADATA")).decode()
    assert re.search(r"^Version: (.*)$", metadata, re.MULTILINE)[1] == flce_ops.__version__
    required = re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    assert [line for line in required if "extra ==" not in line] == ["torch>=2.11"]
    extras = set(re.findall(r"^Provides-Extra: (.*)$", metadata, re.MULTILINE))
    assert {"bench", "demo", "docs", "test", "triton"} <= extras


def test_the_installed_wheel_trains_in_a_fresh_process(built, tmp_path):
    target = tmp_path / "installed"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", "--target", str(target)]
    done = subprocess.run([*command, str(built[0])], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    script = f"""
import torch, flce_ops
assert flce_ops.__file__.startswith({str(target)!r}), flce_ops.__file__
x, w = torch.randn(20, 8, requires_grad=True), torch.randn(31, 8, requires_grad=True)
t = torch.randint(31, (20,))
loss = flce_ops.linear_cross_entropy(x, w, t)
loss.backward()
expected = torch.nn.functional.cross_entropy(x @ w.T, t)
torch.testing.assert_close(loss, expected)
torch.testing.assert_close(w.grad, torch.autograd.grad(expected, w)[0])
print(flce_ops.__version__)
"""
    environment = {**os.environ, "PYTHONPATH": str(target)}
    done = subprocess.run([sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [flce_ops.__version__]


def test_the_version_is_written_once_and_the_changelog_knows_it():
    assert f'"{flce_ops.__version__}"' not in (ROOT / "pyproject.toml").read_text()
    assert f'"{flce_ops.__version__}"' not in (ROOT / "setup.py").read_text()
    written = [f for f in (ROOT / "flce_ops").rglob("*.py") if f'"{flce_ops.__version__}"' in f.read_text()]
    assert written == [ROOT / "flce_ops" / "version.py"]
    released = re.findall(r"^## \[(\d.*?)\] - \d{4}-\d\d-\d\d$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert released[0] == flce_ops.__version__


def test_pre_commit_runs_the_ruff_of_the_requirements():
    pinned = re.search(r"^ruff==(\S+)", (ROOT / "requirements.txt").read_text(), re.MULTILINE)[1]
    assert re.findall(r"rev: v(\S+)", (ROOT / ".pre-commit-config.yaml").read_text()) == [pinned]


def test_the_newest_triton_that_is_allowed_is_the_one_that_make_newest_runs():
    newest = re.search(r"^triton==(\d+)\.(\d+)\.", (ROOT / "requirements-newest.txt").read_text(), re.MULTILINE)
    below = re.search(r'"triton>=[\d.]+,<(\d+)\.(\d+);', (ROOT / "pyproject.toml").read_text())
    assert (int(below[1]), int(below[2])) == (int(newest[1]), int(newest[2]) + 1)
