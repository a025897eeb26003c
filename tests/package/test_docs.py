"""The pages of docs/ build without a warning, their code runs, their messages exist, their figures can be drawn."""

import ast
import functools
import importlib.util
import inspect
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
    "name",
    ["README", *(f"docs/{page}" for page in ("index", "quickstart", "performance", "numerics", *CONTINUE_TRAIN))],
)
def test_code_of_the_page_runs(name):
    if name == "docs/transformers":
        pytest.importorskip("transformers")
    names_after(name)


def text_of(node: ast.AST, names: dict[str, ast.expr] | None = None) -> str | None:
    """The string that the expression makes, with `...` in place of values that are inserted."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(part.value if isinstance(part, ast.Constant) else VALUE for part in node.values)
    if isinstance(node, ast.BinOp):
        parts = (text_of(side, names) or VALUE for side in (node.left, node.right))
        return "".join(parts)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "format":
        text = text_of(node.func.value, names)
        return None if text is None else re.sub(r"{\w*}", VALUE, text)
    if isinstance(node, ast.Name) and node.id in (names or {}):
        return text_of(names[node.id], names)
    return None


def trees() -> dict[str, ast.Module]:
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in (ROOT / "flce_ops").rglob("*.py")}


@functools.cache
def messages_of_the_source() -> set[str]:
    """All strings of flce_ops/ except docstrings."""
    texts = set()
    for tree in trees().values():
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        texts |= {text for node in ast.walk(tree) if id(node) not in docstrings and (text := text_of(node)) is not None}
    return texts


# Messages that need no entry: of conditions that no call reaches, and of a command that prints its usage with them.
INTERNAL = (
    "flce_ops/support/path.py",
    "flce_ops/triton/gemm/backends.py",
    "flce_ops/triton/gemm/matmul.py",  # FLCE_GEMM=torch, for comparisons
    "flce_ops/triton/steps/forward.py",
    "flce_ops/meta/call.py",  # inner operators that are called by hand
    "flce_ops/plan.py",
)
# What follows a text that is a message by itself: "expected gradient_class_order to be ...", "expected ... in [0, 1]".
ENDS = re.compile(r"(\.\.\.: )?\.\.\.(,| in torch.int64,|$)|module \.\.\. has no attribute")
WARNINGS = {"warn", "warning", "warn_once"}
SAID_LATER = {"check_value": 1, "assert_on_device": 1, "assert_when_it_runs": 1}  # the place of the message


def messages_that_users_see() -> set[str]:
    """What flce_ops raises, warns of, and refuses by the tables of support/refusals.py."""
    from flce_ops.entry.arguments import RANGES
    from flce_ops.support.refusals import HOLES, REFUSED

    texts = {text for rows in REFUSED.values() for text in rows.values()} | set(HOLES.values())
    texts |= {f"{expected}, got {VALUE}" for expected, *_ in RANGES.values()}
    found = {re.sub(r"{\w*}", VALUE, text) for text in texts}
    for path, tree in trees().items():
        names = {
            node.targets[0].id: node.value
            for node in tree.body
            if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name)
        }
        for node in [] if path in INTERNAL else ast.walk(tree):
            message = None
            if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call) and node.exc.args:
                message = text_of(node.exc.args[0], names)
            elif isinstance(node, ast.Call):
                name = getattr(node.func, "attr", getattr(node.func, "id", ""))
                place = 0 if name in WARNINGS else SAID_LATER.get(name, len(node.args))
                message = text_of(node.args[place], names) if len(node.args) > place else None
            if message and not ENDS.match(message) and re.search(r"\w{3}", message.replace(VALUE, "")):
                found.add(message)
    return found


OF_OTHERS = (
    "device-side assert triggered",
    "Unsupported types (<class '...LogitsNotComputed'>) passed to ...",
    "only 0-dimensional arrays can be converted to Python scalars",
)


@functools.cache
def quoted_messages() -> tuple[str, ...]:
    """The messages in the headings of the troubleshooting page."""
    headings = re.findall(r"^### (`.*)$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE)
    messages = [message for heading in headings for message in re.findall(r"`([^`]+)`", heading)]
    return tuple(message for message in messages if message not in OF_OTHERS)


def says(text: str, message: str) -> bool:
    """Whether the text has the parts between the inserted values of the message, in order. Texts of the source may
    write a shape: `(..., D)` is one, `...` a value.
    """
    position = 0
    for part in re.split(r"(?<!\()\.\.\.", message):
        position = text.find(part.strip(), position)
        if position < 0:
            return False
        position += len(part.strip())
    return True


@pytest.mark.parametrize("message", quoted_messages())
def test_a_message_of_the_troubleshooting_page_is_in_the_source(message):
    assert any(says(text, message) for text in messages_of_the_source())
    assert len(re.findall(r"\w{2,}", message)) > 1, "too short to be found by"


def test_every_message_that_users_see_has_an_entry_of_the_troubleshooting_page():
    missing = [text for text in messages_that_users_see() if not any(says(text, entry) for entry in quoted_messages())]
    assert not missing, "\n".join(missing)
    assert len(messages_that_users_see()) > 150


def test_one_title_of_all_pages_has_the_words_nan_and_loss():
    """The site's search ranks titles first. A reader of the page finds this entry at the first "NaN"."""
    titles = [title for path in DOCS.glob("*.md") for title in re.findall(r"^#+ (.*)$", path.read_text(), re.MULTILINE)]
    both = [title for title in titles if {"nan", "loss"} <= set(re.findall(r"\w+", title.lower()))]
    assert len(both) == 1 and both[0].startswith("NaN loss")
    text = (DOCS / "troubleshooting.md").read_text()
    assert text.lower().index("nan") == text.index(both[0])


def test_the_api_page_groups_every_argument_of_the_loss_once():
    (table,) = re.findall(r"^\| arguments of .*\n((?:\|.*\n)+)", (DOCS / "api.md").read_text(), re.MULTILINE)
    rows = [line for line in table.splitlines() if "---" not in line and "DTensors" not in line]
    grouped = [name for line in rows for name in re.findall(r"`(\w+)`", line)]
    assert sorted(grouped) == sorted(inspect.signature(flce_ops.linear_cross_entropy).parameters)


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
