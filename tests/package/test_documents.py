"""What README.md, DESIGN.md and docs/ say about signatures, state dicts, refusals, files and measurements is true."""

# N tokens, D hidden, V vocabulary

import csv
import functools
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import flce_ops

ROOT = Path(__file__).resolve().parents[2]
H200 = ROOT / "benchmarks" / "results" / "nvidia-h200"
PATTERNS = ("*.md", "docs/*.md", "benchmarks/*.md", "benchmarks/results/*/*.md")
DOCUMENTS = sorted(str(path.relative_to(ROOT)) for pattern in PATTERNS for path in ROOT.glob(pattern))
COLUMNS = 120
SOURCES = [
    f"/{path.relative_to(ROOT)}"
    for folder in ("flce_ops", "tests", "benchmarks", "examples", "docs", "release")
    for path in (ROOT / folder).rglob("*.py")
]
# Lines that cannot be broken: lines that a program prints, and lines of a map of files, one for each file.
UNBROKEN = {"docs/planner.md": r"FSDP: gathering the weight"}

torch_has_one = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="torch 2.13 has the function")


@functools.cache
def text_of(document: str) -> str:
    return (ROOT / document).read_text()


# ---------------------------------------------------------------- Markdown


@pytest.mark.parametrize("document", DOCUMENTS)
def test_markdown_is_within_120_columns(document):
    unbroken = UNBROKEN.get(document)
    lines = [
        line
        for line in text_of(document).splitlines()
        if len(line) > COLUMNS
        and not re.fullmatch(r"\s*(\S+ )?\S*https?://\S+", line)
        and not (unbroken and re.match(unbroken, line))
    ]
    assert not lines


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_a_document_names_exist(document):
    text = text_of(document)
    folder = (ROOT / document).parent
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)\s]*)?\)", text)
    missing = [link for link in links if "://" not in link and not (folder / link).exists()]
    if document not in ("CHANGELOG.md", "benchmarks/NOTES.md"):  # these describe files of their time
        named = re.findall(r"\b(?:flce_ops|tests|examples|docs)/[\w/]+\.(?:md|csv)\b", text)
        missing += [name for name in named if not (ROOT / name).exists()]
        sources = re.findall(r"(?<![\w/*.])(?:\w+/)*\w+\.py\b", text)  # also `entry/plain.py`, as in maps
        missing += [name for name in sources if not any(source.endswith(f"/{name}") for source in SOURCES)]
    assert not missing


def anchors_of(text: str) -> set[str]:
    """The anchors of its headings, as GitHub and MkDocs make them."""
    headings = re.findall(r"^#+ +(.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_headings_that_a_link_leads_to_exist(document):
    folder = (ROOT / document).parent
    links = re.findall(r"\]\(([^)#\s]*\.md)?#([^)\s]+)\)", text_of(document))
    targets = [(folder / link if link else ROOT / document, anchor) for link, anchor in links]
    assert not [(str(file), anchor) for file, anchor in targets if anchor not in anchors_of(file.read_text())]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_footnotes_are_there_once_and_used(document):
    text = re.sub(r"```.*?```", "", text_of(document), flags=re.DOTALL)
    notes = re.findall(r"^\[\^(\d+)\]:", text, re.MULTILINE)
    assert sorted(set(notes)) == sorted(notes)
    assert set(notes) == set(re.findall(r"\[\^(\d+)\](?!:)", text))


def formulas_of(text: str) -> list[str]:
    blocks = re.findall(r"^```math\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    text = re.sub(r"```.*?```|`[^`\n]+`|^ {4}.*?$", "", text, flags=re.MULTILINE | re.DOTALL)
    return blocks + re.findall(r"\$([^$]+)\$", text)


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if "$" in text_of(name)])
def test_formulas_become_mathml(document):
    convert = pytest.importorskip("latex2mathml.converter").convert
    formulas = formulas_of(text_of(document))
    for formula in formulas:
        read = re.sub(r"<[^>]+>", "", convert(formula))
        # a command that latex2mathml does not know
        assert "\\" not in read and "&amp;" not in read and "$" not in read, formula


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if "$" in text_of(name)])
def test_github_reads_inline_formulas_as_they_are_written(document):
    r"""GitHub reads Markdown first: `\,` becomes a comma, and `}_` may begin emphasis."""
    inline = [formula for formula in formulas_of(text_of(document)) if not formula.endswith("\n")]
    assert not [formula for formula in inline if re.search(r"[})\]]_|\\[^a-zA-Z]|\*", formula)]


# ---------------------------------------------------------------- signatures and state dicts


@torch_has_one
def test_names_and_defaults_are_torchs_but_for_what_the_api_page_names():
    """docs/api.md names the exceptions: ignore_index is -100 here, None there; linear_bias may be positional."""
    ours, theirs = (
        inspect.signature(function).parameters for function in (flce_ops.linear_cross_entropy, F.linear_cross_entropy)
    )
    assert theirs.keys() <= ours.keys()
    common = [name for name in theirs if name in ours]
    assert [name for name in common if ours[name].default != theirs[name].default] == ["ignore_index"]
    assert (ours["ignore_index"].default, theirs["ignore_index"].default) == (-100, None)
    assert [name for name in common if ours[name].kind != theirs[name].kind] == ["linear_bias"]
    assert theirs["linear_bias"].kind is inspect.Parameter.KEYWORD_ONLY
    assert list(ours)[:3] == list(theirs)[:3] == ["input", "linear_weight", "target"]


def test_ignore_index_of_none_is_the_default():
    input, weight, target = torch.randn(9, 5), torch.randn(7, 5), torch.randint(7, (9,))
    target[3] = -100
    loss = flce_ops.linear_cross_entropy(input, weight, target)
    assert torch.equal(flce_ops.linear_cross_entropy(input, weight, target, ignore_index=None), loss)


def test_linear_bias_may_be_passed_by_position():
    input, weight, bias, target = torch.randn(9, 5), torch.randn(7, 5), torch.randn(7), torch.randint(7, (9,))
    by_name = flce_ops.linear_cross_entropy(input, weight, target, linear_bias=bias)
    assert torch.equal(flce_ops.linear_cross_entropy(input, weight, target, bias), by_name)


def test_the_head_is_constructed_as_linear_but_without_a_bias():
    """README, A module: parameters and state dict are nn.Linear's; there is no bias unless asked for."""
    ours, theirs = (inspect.signature(made).parameters for made in (flce_ops.LinearCrossEntropyHead, nn.Linear))
    assert list(ours)[: len(theirs)] == list(theirs)
    assert [name for name in theirs if ours[name].default != theirs[name].default] == ["bias"]
    assert issubclass(flce_ops.LinearCrossEntropyHead, nn.Linear)
    for bias in (False, True):
        head, linear = flce_ops.LinearCrossEntropyHead(5, 7, bias=bias), nn.Linear(5, 7, bias=bias)
        shapes = [{name: value.shape for name, value in module.state_dict().items()} for module in (head, linear)]
        assert shapes[0] == shapes[1]
    assert list(flce_ops.LinearCrossEntropyHead(5, 7).state_dict()) == ["weight"]


@pytest.mark.skipif(not hasattr(nn, "LinearCrossEntropyLoss"), reason="torch 2.13 has the module")
@pytest.mark.parametrize("out_features", [(), (2, 3)])
def test_the_losss_state_dict_is_torchs(out_features):
    shapes = [
        {
            name: value.shape
            for name, value in module(5, 7, out_features=out_features, bias=True, weight=torch.rand(7))
            .state_dict()
            .items()
        }
        for module in (flce_ops.LinearCrossEntropyLoss, nn.LinearCrossEntropyLoss)
    ]
    assert shapes[0] == shapes[1]


# ---------------------------------------------------------------- what the package does not do


def call(**options):
    made = {"input": torch.randn(9, 5), "linear_weight": torch.randn(7, 5), "target": torch.randint(7, (9,))}
    return flce_ops.linear_cross_entropy(**(made | options))


NO_GOALS = {
    "learnt probabilities": ({"target": torch.rand(9, 7, requires_grad=True)}, NotImplementedError),
    "z_loss of probabilities": ({"target": torch.rand(9, 7), "z_loss": 0.1}, NotImplementedError),
    "metrics of probabilities": ({"target": torch.rand(9, 7), "return_metrics": True}, NotImplementedError),
    "gradient of class weights": ({"weight": torch.rand(7, requires_grad=True)}, NotImplementedError),
    "softcap": ({"softcap": torch.tensor(5.0)}, TypeError),
    "z_loss": ({"z_loss": torch.tensor(0.1)}, TypeError),
    "label_smoothing": ({"label_smoothing": torch.tensor(0.1)}, TypeError),
    "temperature behind a cap": ({"temperature": torch.tensor(2.0), "softcap": 5.0}, NotImplementedError),
    "sparse": ({"linear_weight": torch.randn(7, 5).to_sparse()}, TypeError),
    "float8": ({"input": torch.randn(9, 5).to(torch.float8_e4m3fn)}, TypeError),
}


@pytest.mark.parametrize(("options", "error"), NO_GOALS.values(), ids=NO_GOALS)
def test_what_is_no_goal_is_refused(options, error):
    with pytest.raises(error):
        call(**options)


def test_probabilities_as_targets_have_the_gradients_of_their_divergence():
    input, weight = torch.randn(9, 5, dtype=torch.float64), torch.randn(7, 5, dtype=torch.float64)
    probs = torch.randn(9, 7, dtype=torch.float64).softmax(-1)
    grads = []
    for loss_of in (
        lambda x, w: F.cross_entropy(F.linear(x, w), probs),
        lambda x, w: flce_ops.linear_kl_div(x, w, teacher_probs=probs),
    ):
        operands = [tensor.clone().requires_grad_() for tensor in (input, weight)]
        grads.append(torch.autograd.grad(loss_of(*operands), operands))
    torch.testing.assert_close(grads[0], grads[1])


def test_the_page_of_non_goals_is_in_the_navigation_and_in_the_readme():
    assert "non_goals.md" in (ROOT / "mkdocs.yml").read_text()
    assert "(docs/non_goals.md)" in text_of("README.md")


def test_the_page_of_reliability_names_commands_and_tests_that_exist():
    page, makefile = text_of("docs/reliability.md"), (ROOT / "Makefile").read_text()
    targets = set(re.findall(r"^([\w-]+):", makefile, re.MULTILINE))
    assert set(re.findall(r"`make ([\w-]+)`", page)) <= targets
    assert {"check", "test", "test-all", "test-gpu", "nightly", "matrix"} <= set(re.findall(r"`make ([\w-]+)`", page))
    for module in re.findall(r"`python -m ([\w.]+)", page):
        assert importlib.util.find_spec(module) is not None, module
    assert "reliability.md" in (ROOT / "mkdocs.yml").read_text() and "(docs/reliability.md)" in text_of("README.md")


def test_the_page_of_stability_has_every_public_name_and_the_bounds_of_the_package():
    page, package = text_of("docs/stability.md"), text_of("pyproject.toml")
    assert not [name for name in flce_ops.__all__ if name != "__version__" and f"`{name}`" not in page]
    assert f"The current version is {flce_ops.__version__}," in page
    (torch_from,), (python,) = re.findall(r'"torch>=([\d.]+)"', package), re.findall(r'python = ">=([\d.]+)"', package)
    ((first, after),) = re.findall(r'"triton>=([\d.]+),<3\.(\d+);', package)
    for bound in (f"| torch | {torch_from} or", f"| Python | {python} or", f"| {first} to 3.{int(after) - 1} |"):
        assert bound in page, bound
    for extra in ("transformers", "trl"):
        (bound,) = re.findall(rf'"{extra}>=([\d.]+)"', package)
        assert re.search(rf"^\| {extra} \| {bound} or later", page, re.MULTILINE | re.IGNORECASE), extra


# ---------------------------------------------------------------- measurements


def measured(mode: str = "fwd_bwd") -> list[dict[str, str]]:
    with (H200 / "fwd_bwd.csv").open(newline="") as file:
        return [row for row in csv.DictReader(file) if row["mode"] == mode and row["ms"]]


def test_the_tests_that_show_a_client_exist():
    named = re.findall(r"`(test_[\w*]+)`", text_of("docs/clients.md"))
    assert len(named) >= 15
    assert not [name for name in named if not list((ROOT / "tests").rglob(f"{name}.py"))]


def test_tables_are_made_of_the_csvs():
    """To update them after another run: python -m benchmarks.tables."""
    from benchmarks.tables import __main__ as tables

    texts = {path: path.read_text() for path in tables.documents()}
    for path, text in texts.items():
        assert tables.written(text) == text, path
    for name in tables.TABLES:
        assert any(f"<!-- {name} -->" in text and f"<!-- end of {name} -->" in text for text in texts.values()), name


def test_the_other_objectives_are_all_of_one_run():
    from benchmarks import objectives
    from benchmarks.tables import markdown
    from benchmarks.tables import objectives as tables

    rows = markdown.rows_of("objectives")
    assert len({row["commit"] for row in rows}) == 1
    for shape in objectives.SHAPES.split(","):
        for dtype, mode, provider in objectives.units_of("*"):
            step = (mode.name, provider, str(dtype).removeprefix("torch."))
            assert tables.found(rows, shape, step), (shape, step)


def test_the_figure_of_the_readme_is_drawn_from_the_csv(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("triton")  # the planner for the other figures needs Triton
    from matplotlib import pyplot as plt

    from benchmarks import docs_figures

    figure = docs_figures.time_against_memory(plt, H200 / "fwd_bwd.csv")
    points = [line for line in figure.axes[0].lines if line.get_marker() == "o"]
    drawn = {(x, y) for line in points for x, y in zip(line.get_xdata(), line.get_ydata())}
    plt.close(figure)
    names = docs_figures.OURS_AT | docs_figures.PEERS
    shape = (docs_figures.TOKENS, docs_figures.HIDDEN, docs_figures.VOCABULARY)
    expected = {
        (float(row["ms"]), float(row["beyond_gradients_MiB"]))
        for row in measured()
        if row["provider"] in names and (int(row["N"]), int(row["D"]), int(row["V"])) == shape
    }
    assert drawn == expected and len(drawn) >= 9
    assert re.findall(r"!\[[^\]]*\]\((.*?)\)", text_of("README.md")) == ["docs/figures/time_against_memory.svg"]


# ---------------------------------------------------------------- continuous integration


def test_the_public_workflow_runs_what_a_submission_does_with_its_inputs():
    workflow, submission = (text_of(name) for name in (".github/workflows/ci.yml", ".ci/run"))
    runs = re.findall(r"- run: (.*)", workflow)
    assert runs[:2] == ["make check", "make test-all"] and submission.endswith("\nmake test-all\n")
    (seed,) = re.findall(r"FLCE_TEST_SEED:-(\d+)", submission)
    assert re.findall(r'FLCE_TEST_SEED: "(\d+)"', workflow) == [seed]
    assert "make triton-versions" in workflow and "make matrix" in workflow


def test_a_release_is_tested_on_every_python_of_the_package_before_it_is_published():
    workflow, package = text_of(".github/workflows/release.yml"), text_of("pyproject.toml")
    (pythons,) = re.findall(r"python: \[(.*)\]", workflow)
    (oldest,) = re.findall(r'requires-python = ">=3\.(\d+)"', package)
    assert pythons == ", ".join(f'"3.{minor}"' for minor in range(int(oldest), 15))
    assert pythons.replace('"', "").split(", ") == re.findall(r"Python :: (3\.\d+)", package)
    assert "python -m release.smoke dist/*.whl" in workflow
    assert "$(PYTHON) -m release.smoke dist/*.whl" in text_of("Makefile")
    for job, needed in (("smoke", "build"), ("publish", "smoke")):
        assert f"  {job}:\n    needs: {needed}\n" in workflow
    assert "id-token: write" in workflow and "password" not in workflow


def test_pages_make_mathml_of_inline_and_display_formulas():
    pytest.importorskip("latex2mathml")
    spec = importlib.util.spec_from_file_location("pages", ROOT / "docs" / "pages.py")
    pages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(pages)
    inline, display = '<span class="arithmatex">\\(a &lt; b\\)</span>', '<div class="arithmatex">\n\\[\nc\n\\]\n</div>'
    html = f"<p>{inline}</p>{display}<p>\\(d\\)</p>"
    made = pages.on_page_content(html)
    assert made.count("<math") == 2 and "arithmatex" not in made
    assert 'display="inline"' in made and 'display="block"' in made and made.endswith("<p>\\(d\\)</p>")
