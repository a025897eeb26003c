"""The wheel and the sdist: their contents, and that they install, import and type-check on their own."""

import email
import importlib.metadata
import inspect
import os
import re
import shutil
import subprocess
import sys
import tarfile
import textwrap
import typing
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from guides import CONTINUE_TRAIN

import flce_ops
from flce_ops.functional.log_probs import Keywords

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ["pyproject.toml", "setup.py", "MANIFEST.in", "README.md", "LICENSE", "CHANGELOG.md"]
FOLDERS = ["flce_ops", "tests", "examples", "benchmarks", "docs"]


def version_of(distribution: str) -> int:
    try:
        return int(importlib.metadata.version(distribution).split(".")[0])
    except importlib.metadata.PackageNotFoundError:
        return 0


# the version of setuptools that pyproject.toml requires; only the build's own process imports it
pytestmark = pytest.mark.skipif(
    version_of("setuptools") < 77 or not version_of("pip"), reason="needs setuptools >= 77 and pip"
)


def build(hook: str, tree: Path, out: Path) -> Path:
    """Runs setuptools' own build hook in a fresh process, as a frontend without isolation does."""
    script = f"from setuptools import build_meta; import sys; build_meta.{hook}(sys.argv[1])"
    done = subprocess.run([sys.executable, "-c", script, str(out)], cwd=tree, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (built,) = out.iterdir()
    return built


@pytest.fixture(scope="module")
def tree(tmp_path_factory):
    """A copy of the checkout, because setuptools leaves a build folder behind."""
    tree = tmp_path_factory.mktemp("tree")
    for name in SOURCES:
        shutil.copy(ROOT / name, tree)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, tree / name, ignore=shutil.ignore_patterns("__pycache__", "results"))
    return tree


@pytest.fixture(scope="module")
def built(tree, tmp_path_factory):
    """(wheel, sdist, wheel made from the sdist)"""
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


def test_the_wheel_is_smaller_than_400_kb(built):
    assert built[0].stat().st_size < 400_000


@pytest.fixture(scope="module")
def metadata(built):
    """The wheel's METADATA: an e-mail message, whose body is the long description."""
    text = next(text for name, text in names_and_contents(built[0]).items() if name.endswith("METADATA"))
    return email.message_from_string(text.decode())


def test_the_metadata_has_the_version_the_extras_and_no_dependency_but_torch(metadata):
    assert metadata["Version"] == flce_ops.__version__
    assert [line for line in metadata.get_all("Requires-Dist") if "extra ==" not in line] == ["torch>=2.11"]
    assert {"bench", "demo", "docs", "test", "triton"} <= set(metadata.get_all("Provides-Extra"))


def test_the_metadata_says_who_where_for_whom_and_under_which_license(metadata):
    assert metadata["Author"] == "The flce_ops authors" and "Author-email" not in metadata
    urls = dict(line.split(", ") for line in metadata.get_all("Project-URL"))
    assert set(urls) == {"Homepage", "Documentation", "Issues", "Changelog"}
    assert all(url.startswith(urls["Homepage"]) for url in urls.values())
    classifiers = metadata.get_all("Classifier")
    assert {line.split(" :: ")[0] for line in classifiers} >= {"Development Status", "Intended Audience", "Topic"}
    assert metadata["License-Expression"] == "BSD-3-Clause" and metadata.get_all("License-File") == ["LICENSE"]
    assert not [line for line in classifiers if line.startswith("License")]  # an index refuses both


def test_links_of_the_long_description_lead_to_the_files_of_the_release(metadata):
    description, readme = metadata.get_payload(), (ROOT / "README.md").read_text()
    assert metadata["Description-Content-Type"] == "text/markdown"
    links = re.findall(
        r"(!?)\[[^\]]*\]\(([^)\s#]+)", re.sub(r"```.*?```|`[^`\n]*`", "code", description, flags=re.DOTALL)
    )
    home = dict(line.split(", ") for line in metadata.get_all("Project-URL"))["Homepage"]
    paths = []
    for image, link in links:
        assert link.startswith("https://"), link
        of_file = f"{home}/{'raw' if image else 'blob'}/v{flce_ops.__version__}/"
        if link.startswith(home):
            assert link.startswith(of_file), link
            paths.append(link.removeprefix(of_file))
    assert paths and all((ROOT / path).exists() for path in paths)
    code = [re.findall(r"```.*?```", text, re.DOTALL) for text in (description, readme)]
    assert code[0] == code[1]


def test_a_release_with_placeholders_is_refused(tmp_path, capsys):
    from release.placeholders import main

    project = tmp_path / "pyproject.toml"
    for placeholder in (
        *("https://x.invalid/issues", "https://x.INVALID", "http://x.invalid?a=b", "https://x.invalid#top"),
        *("git@x.invalid:a/b.git", "ssh://git@x.invalid:22/a", "x.invalid/a", "https://invalid", "https://x.invalid."),
        *("https://example.com/a", "https://www.Example.org", "http://localhost:8000/a", "https://docs.example/a"),
    ):
        urls = f'Homepage = \'https://github.com/a/b\'\n"Bug reports" = "{placeholder}"\n'
        project.write_text(f"[project.urls]\n{urls}")
        assert main(project) == 1 and f": {placeholder}\n" in capsys.readouterr().err
    good = (
        'Homepage = "https://github.com/a/example"  # .invalid stood here\nDocs = "https://a.test.dev/invalid?test"\n'
    )
    project.write_text(f'[project.urls]\n{good}[tool.x]\nurl = "https://x.invalid"\n')
    assert main(project) == 0
    project.write_text('[project]\nname = "a"\n')
    assert main(project) == 1
    recipe = re.search(r"^release:\n\t(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1]
    assert recipe == "$(PYTHON) -m release.placeholders"
    workflow = (ROOT / ".github/workflows/release.yml").read_text()
    assert workflow.index("release.placeholders") < workflow.index("-m build\n")


def test_the_workflow_publishes_what_passed_all_tests_by_actions_that_cannot_move():
    workflow = (ROOT / ".github/workflows/release.yml").read_text()
    tests, publish = (
        re.search(rf"^  {job}:\n.*?(?=^  \w|\Z)", workflow, re.DOTALL | re.MULTILINE)[0] for job in ("tests", "publish")
    )
    assert "      - run: make test-all\n" in tests
    assert "    needs: [tests, smoke]\n" in publish and workflow.count("id-token: write") == 1
    used = re.findall(r"uses: (.*)", publish)
    assert used and all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}  # v\S+", action) for action in used)


def test_the_weekly_job_installs_what_the_tests_of_trainers_need():
    weekly = (ROOT / ".github/workflows/ci.yml").read_text().split("\n  newest:\n")[1]
    (imported,) = re.findall(r'-c "import (.*)"', weekly)
    assert {"triton", "transformers", "accelerate", "peft", "trl", "grimp"} <= set(imported.split(", "))


def test_links_of_the_long_description_have_no_empty_part():
    namespace: dict = {}
    exec((ROOT / "setup.py").read_text().removesuffix("setup(distclass=WithAbsoluteLinks)\n"), namespace)
    for homepage in ("https://x.org/a", "https://x.org/a/"):
        assert namespace["with_absolute_links"]("[b](c.md)", homepage, "v1") == "[b](https://x.org/a/blob/v1/c.md)"


def test_the_address_of_the_repository_is_written_in_one_place():
    address = re.search(r'^Homepage = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)[1]
    files = subprocess.run(["git", "grep", "-lF", address], cwd=ROOT, capture_output=True, text=True).stdout.split()
    assert files in (["pyproject.toml"], [])  # none where there is no git


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


def test_an_editable_install_is_a_path_that_type_checkers_follow(tree, tmp_path):
    """A finder would not do, because mypy and Pylance do not run it."""
    files = names_and_contents(build("build_editable", tree, tmp_path))
    (path,) = (text for name, text in files.items() if name.endswith(".pth"))
    assert path.decode().strip() == str(tree)
    assert not [name for name in files if name.endswith(".py")]


# ---------------------------------------------------------------- types

PAGES = ("README.md", "docs/index.md", "docs/quickstart.md", "docs/performance.md", "docs/policy_loss.md")

# put around a block that is no complete program
FRAGMENT = """
from typing import Any
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

def fragment(model: Any, mesh: DeviceMesh) -> None:
"""

# `type: ignore` marks what must be an error: one that is not needed is an error too
CALLS = """
from collections.abc import Sequence
from torch import Tensor, nn, ones
from torch.distributed.tensor.parallel import ParallelStyle
from typing_extensions import assert_type
import flce_ops
from flce_ops import LinearLogProbs
from flce_ops.integrations import transformers
from transformers import LlamaForCausalLM

x, w, y = ones(3, 2), ones(4, 2), ones(3).long()
names: Sequence[str] = ["entropy"]

def flags(flag: bool, either: bool | Sequence[str], maybe: Sequence[str] | None) -> None:
    flce_ops.linear_cross_entropy(x, w, y, return_metrics=flag)
    flce_ops.linear_cross_entropy(x, w, y, return_metrics=either)
    flce_ops.linear_log_probs(x, w, y, return_metrics=maybe)
    flce_ops.cross_entropy(x, y, return_metrics=flag)

flce_ops.linear_cross_entropy(x, w, y, reduction="sum", z_loss=0.1).backward()
of_head, metrics = flce_ops.linear_cross_entropy(x, w, y, return_metrics=True)
of_head.backward(), metrics.argmax.eq(y)
of_head, by_name = flce_ops.linear_cross_entropy(x, w, y, return_metrics=names)
of_head.backward(), by_name["entropy"].mean()
flce_ops.cross_entropy(x, y, inplace_backward=True).backward()
of_logits, metrics = flce_ops.cross_entropy(x, y, return_metrics=True)
of_logits.backward(), metrics.token_accuracy.item()
assert_type(flce_ops.linear_log_probs(x, w, y, tail=True), LinearLogProbs)
assert_type(flce_ops.linear_log_probs(x, w, y, return_metrics=names), tuple[LinearLogProbs, dict[str, Tensor]])
found = flce_ops.linear_log_probs(x, w, y, entropy=True, argmax=True, tail=True)
(found.entropy.mean() + found.tail_log_prob.mean()).item(), found.argmax.eq(y)
assert_type(flce_ops.linear_kl_div(x, w, x, w, kind="jsd"), Tensor)
assert_type(flce_ops.linear_policy_loss(x, w, y, ones(3), objective="cispo", kl_estimator="k1").loss, Tensor)

head, loss = flce_ops.LinearCrossEntropyHead(2, 4, gradient_mode="drop"), flce_ops.LinearCrossEntropyLoss(2, 4)
head.forward(x, y, reduction="none").sum()
loss.forward(x, y, shift=True).backward()

def patches(model: LlamaForCausalLM, any_model: nn.Module) -> None:
    assert_type(transformers.patch(model), LlamaForCausalLM)
    assert_type(transformers.unpatch(any_model), nn.Module)
    assert_type(transformers.patch(LlamaForCausalLM), type[LlamaForCausalLM])
    with transformers.patched(model) as inside:
        assert_type(inside, LlamaForCausalLM)

plan: ParallelStyle = flce_ops.VocabParallel(use_local_output=False)

flce_ops.linear_cross_entropy(x, w, y, reduction="average")  # type: ignore
flce_ops.linear_cross_entropy(x, w, y, gradient_mode="top")  # type: ignore
flce_ops.linear_cross_entropy(x, w, labels=y)  # type: ignore
flce_ops.linear_log_probs(x, w, y, gradient_sparse="weight")  # type: ignore
flce_ops.cross_entropy(x, y, logit_scale=x)  # type: ignore
flce_ops.linear_kl_div(x, w, x, w, kind="backward")  # type: ignore
flce_ops.linear_policy_loss(x, w, y, ones(3), objective="grpo")  # type: ignore
flce_ops.VocabParallel(input_layouts="Shard(1)")  # type: ignore
flce_ops.linear_cross_entropie  # type: ignore
"""


@pytest.fixture(scope="module")
def typed_programs(built, tmp_path_factory):
    """A folder with the code of the pages and with CALLS, and the Python of an environment with the wheel."""
    pytest.importorskip("transformers")
    folder = tmp_path_factory.mktemp("typed")
    environment = folder / "environment"
    venv.create(environment)
    (site,) = environment.glob("[lL]ib/**/site-packages")
    with zipfile.ZipFile(built[0]) as wheel:
        wheel.extractall(site)
    (site / "torch.pth").write_text(str(Path(torch.__file__).parents[1]))
    for page in PAGES:
        program = ""
        text = (ROOT / page).read_text()
        if Path(page).stem in CONTINUE_TRAIN:
            text = (ROOT / "docs" / "quickstart.md").read_text() + text
        for kind, block in re.findall(r"^```(py|python)\n(.*?)```", text, re.DOTALL | re.MULTILINE):
            program += block if kind == "python" else FRAGMENT + textwrap.indent(block, "    ")
        (folder / f"{Path(page).stem.lower()}_page.py").write_text(program)
    (folder / "calls.py").write_text(CALLS)
    (folder / "pyrightconfig.json").write_text(
        '{"include": ["*.py"], "typeCheckingMode": "standard", "reportUnnecessaryTypeIgnoreComment": "error"}'
    )
    (python,) = [path for path in environment.glob("*/python*") if path.stem == "python"]
    return folder, python


def check_types(folder: Path, *command: str) -> None:
    # PYTHONPATH contains the checkout
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run([sys.executable, *command], cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.exhaustive
def test_the_pages_and_typed_calls_pass_mypy_against_the_wheel(typed_programs):
    pytest.importorskip("mypy")
    folder, python = typed_programs
    options = ("--strict", "--untyped-calls-exclude=torch", "--config-file=", "--cache-dir=cache")
    files = [path.name for path in folder.glob("*.py")]
    check_types(folder, "-m", "mypy", *options, "--python-executable", str(python), *files)


@pytest.mark.exhaustive
def test_the_pages_and_typed_calls_pass_pyright_against_the_wheel(typed_programs):
    pytest.importorskip("pyright")
    folder, python = typed_programs
    check_types(folder, "-m", "pyright", "--pythonpath", str(python))


def test_overloads_take_the_keywords_of_the_function():
    parameters = inspect.signature(flce_ops.linear_log_probs).parameters.values()
    options = {one.name: one.annotation for one in parameters if one.kind is one.KEYWORD_ONLY}
    del options["return_metrics"]
    assert typing.get_type_hints(Keywords) == options


def test_the_version_is_written_once_and_the_changelog_knows_it():
    assert f'"{flce_ops.__version__}"' not in (ROOT / "pyproject.toml").read_text()
    assert f'"{flce_ops.__version__}"' not in (ROOT / "setup.py").read_text()
    written = [f for f in (ROOT / "flce_ops").rglob("*.py") if f'"{flce_ops.__version__}"' in f.read_text()]
    assert written == [ROOT / "flce_ops" / "version.py"]
    dated = r"^## (\d\S*) \((?:\d{4}-\d\d-\d\d|not yet published)\)$"
    assert re.findall(dated, (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == flce_ops.__version__


def test_the_oldest_and_the_newest_triton_that_are_allowed_run_every_kernel():
    files = [(ROOT / f"requirements-{version}.txt").read_text() for version in ("oldest", "newest")]
    oldest, newest = (re.search(r"^triton==(\d+)\.(\d+)\.", text, re.MULTILINE).groups() for text in files)
    allowed = re.search(r'"triton>=(\d+)\.(\d+),<(\d+)\.(\d+);', (ROOT / "pyproject.toml").read_text()).groups()
    assert allowed == (*oldest, newest[0], str(int(newest[1]) + 1))
