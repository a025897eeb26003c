"""The pages of docs/ build without a warning, their code runs, their messages exist, their figures can be drawn."""

import ast
import functools
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from guides import CONTINUE_TRAIN, names_after

import flce_ops

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
VALUE = "..."


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip("mkdocs")
    pytest.importorskip("material")
    pytest.importorskip("mkdocstrings")
    out = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    # with a proxy that does not answer, a build that fetches something fails
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    environment = {**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr, done.stdout + done.stderr
    return out


def page(site: Path, name: str) -> str:
    return (site / f"{name}.html").read_text()


def test_the_reference_documents_every_public_name(site):
    api = page(site, "api")
    for name in flce_ops.__all__:
        if not name.startswith("_"):
            assert re.search(rf'id="flce_ops\.([\w.]+\.)?{name}"', api), name
    assert "label_smoothing" in api and "Composability" in api


def test_the_reference_has_no_name_but_public_ones_and_the_fields_of_results(site):
    api = page(site, "api")
    headings = re.findall(r'<h\d id="flce_ops[^"]*"[^>]*>(.*?)</h\d>', api, re.DOTALL)
    names = {re.search(r"flce_ops[\w.]*", re.sub(r"<[^>]+>", "", heading))[0] for heading in headings}
    public = {f"flce_ops.{name}" for name in flce_ops.__all__} - {"flce_ops.__version__"}
    assert {name for name in names if not name.startswith("flce_ops.integrations.")} == public
    for result in (flce_ops.LinearCrossEntropyMetrics, flce_ops.LinearLogProbs, flce_ops.LinearPolicyResult):
        section = api.split(f'id="flce_ops.{result.__name__}"')[1].split("</h3>", 1)[1].split("<h3")[0]
        assert all(f">{field}</span>" in section for field in result._fields), result


@pytest.mark.parametrize(
    "name", ["README", *(f"docs/{page}" for page in ("index", "quickstart", "paths", *CONTINUE_TRAIN))]
)
def test_code_of_the_page_runs(name):
    if name == "docs/transformers":
        pytest.importorskip("transformers")
    names_after(name)


@functools.cache
def messages_of_the_source() -> set[str]:
    """All strings of flce_ops/ except docstrings, with `...` in place of values that are inserted."""
    texts = set()
    for path in (ROOT / "flce_ops").rglob("*.py"):
        tree = ast.parse(path.read_text())
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
                texts.add(node.value)
            elif isinstance(node, ast.JoinedStr):
                texts.add("".join(part.value if isinstance(part, ast.Constant) else VALUE for part in node.values))
    return texts


OF_OTHERS = ("device-side assert triggered", "Unsupported types (<class '...LogitsNotComputed'>) passed to ...")


def quoted_messages() -> list[str]:
    """The headings of the pages that are messages, and messages of this package that the prose quotes."""
    text = (DOCS / "troubleshooting.md").read_text()
    headings = re.findall(r"^### (`.*)$", text, re.MULTILINE)
    messages = [message for heading in headings for message in re.findall(r"`([^`]+)`", heading)]
    quoted = ["got a class index outside"]
    return [message for message in messages if message not in OF_OTHERS] + quoted


def parts_of(message: str) -> list[str]:
    """The parts between inserted values. The source may write these out: `(..., D)` is a shape, `...` a value."""
    return [part for part in (piece.strip() for piece in re.split(r"(?<!\()\.\.\.", message)) if part]


@pytest.mark.parametrize("message", quoted_messages())
def test_a_message_of_the_troubleshooting_page_is_in_the_source(message):
    def says(text: str) -> bool:
        position = 0
        for part in parts_of(message):
            position = text.find(part, position)
            if position < 0:
                return False
            position += len(part)
        return True

    assert any(says(text) for text in messages_of_the_source())


def test_figures_of_the_pages_are_drawn_by_the_command(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("triton")
    from benchmarks.docs_figures import main

    drawn = {path.name: path.read_text() for path in main(["--out", str(tmp_path)])}
    assert set(drawn) == {path.name for path in (DOCS / "figures").iterdir()}
    used = {name for text in DOCS.glob("*.md") for name in re.findall(r"\(figures/([^)]+)\)", text.read_text())}
    assert used == set(drawn)
    assert all("<svg" in text and len(text) > 5000 for text in drawn.values())


def anchors_of(text: str) -> set[str]:
    """The anchors of its headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def test_links_lead_to_files_and_headings_that_exist():
    missing = []
    for document in (path for pattern in ("*.md", "docs/*.md", "benchmarks/*.md") for path in ROOT.glob(pattern)):
        for link, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", document.read_text()):
            target = document.parent / link if link else document
            there = "://" in link or target.exists()
            if not there or (anchor and target.suffix == ".md" and anchor not in anchors_of(target.read_text())):
                missing.append((document.name, link, anchor))
    assert not missing


def test_commands_that_the_pages_name_exist():
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for document in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS.glob("*.md")):
        text = document.read_text()
        assert set(re.findall(r"`make ([\w-]+)", text)) <= targets, document.name
        for module in re.findall(r"python -m ((?:flce_ops|benchmarks|tests|examples)[\w.]*)", text):
            assert importlib.util.find_spec(module) is not None, (document.name, module)


def test_tables_of_the_pages_are_made_of_the_csvs():
    """To update them after another run: python -m benchmarks.tables."""
    from benchmarks.tables import __main__ as tables

    for path in tables.documents():
        assert tables.written(path.read_text()) == path.read_text(), path
