"""What mkdocs does to the pages of docs/, in addition to Markdown.

    <!-- include FILE -->       the text of a file of the repository (DESIGN.md, CHANGELOG.md), without its title
    <!-- include FILE#TITLE -->   of one of its sections
    <!-- remaining names -->    the public names that api.md does not list by hand

Links to files of the repository that are no pages (tests, sources) become plain text, because the site has no copy of
these files. Formulas, $...$ and ```math, become MathML, which browsers draw themselves, so the pages load no script. A
page that is not named in the navigation of mkdocs.yml is listed among the guides. If git knows the checkout's origin,
the navigation ends with a link to it.
"""

import ast
import posixpath
import re
import subprocess
from html import unescape
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIRECTIVE = re.compile(r"^<!-- (include \S+|remaining names) -->$", re.MULTILINE)
CODE = r"```.*?```|(?<!`)`[^`\n]+`"
LINK = re.compile(CODE + r"|(?<!!)\[([^\]]+)\]\(([^)#\s]+)(#[^)\s]*)?\)", re.DOTALL)
FORMULA = re.compile(r'<(?P<tag>span|div) class="arithmatex">\s*\\[(\[](?P<tex>.*?)\\[)\]]\s*</(?P=tag)>', re.DOTALL)
EMPTY_ROWS = "<tbody>\n<tr>\n<td></td>\n</tr>\n</tbody>\n"  # the rows of a table that has only a heading
# Pages of optional parts: left out of the navigation if they do not exist.
OPTIONAL = {"transformers.md", "distillation.md"}
# How a search weighs a page beside others: who looks for "NaN loss" wants what to do, who looks for a function its
# reference, and nobody a list of changes.
BOOST = {"troubleshooting.md": 4, "api.md": 3, "changelog.md": 0.2}


def on_config(config):
    nav = without_missing(config["nav"])
    guides = next(entry["Guides"] for entry in nav if "Guides" in entry)
    listed = set(pages_of(nav))
    guides += [page.name for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in listed]
    repository = repository_url()
    if repository:
        nav.append({"Repository": repository})
    config["nav"] = nav
    return config


def repository_url() -> str | None:
    """The web address of the checkout's origin, for a link; None if there is none."""
    command = ["git", "-C", str(ROOT), "config", "--get", "remote.origin.url"]
    try:
        origin = subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except FileNotFoundError:  # git is not installed
        return None
    origin = re.sub(r"^git@([^:/]+):", r"https://\1/", origin).removesuffix(".git")
    return re.sub(r"^https://[^@/]*@", "https://", origin) if origin.startswith("https://") else None


def pages_of(nav: list) -> list[str]:
    return [
        page
        for entry in nav
        for target in entry.values()
        for page in (pages_of(target) if isinstance(target, list) else [target])
    ]


def without_missing(nav: list) -> list:
    kept = []
    for entry in nav:
        ((title, target),) = entry.items()
        if isinstance(target, list):
            kept.append({title: without_missing(target)})
        elif target not in OPTIONAL or (ROOT / "docs" / target).exists():
            kept.append(entry)
    return kept


def on_page_markdown(markdown: str, page, **_) -> str:
    if page.file.src_uri in BOOST:
        page.meta["search"] = {"boost": BOOST[page.file.src_uri]}

    def directive(match: re.Match) -> str:
        word, _, rest = match[1].partition(" ")
        if word == "include":
            return included(*rest.partition("#")[::2])
        return remaining_names(markdown)

    return with_links(DIRECTIVE.sub(directive, markdown), "docs")


def included(file: str, anchor: str) -> str:
    """A file without its title, or the section with this anchor without its heading."""
    text = (ROOT / file).read_text()
    if anchor:
        sections = re.findall(r"^## (.*)\n((?:(?!## ).*\n?)*)", text, re.MULTILINE)
        (text,) = (body.strip() for title, body in sections if title.lower().replace(" ", "-") == anchor)
    return with_links(re.sub(r"\A# .*\n", "", text), posixpath.dirname(file))


def with_links(text: str, folder: str) -> str:
    """The text with links that a page can follow. Its links were relative to a folder of the repository."""
    return LINK.sub(lambda match: link(match, folder), text)


def on_page_content(html: str, page=None, **_) -> str:
    """Formulas become MathML. In docstrings reST's `::` before a literal block becomes a colon, and a page's name a
    link.
    """
    html = FORMULA.sub(formula, html).replace(EMPTY_ROWS, "").replace("::</p>", ":</p>")
    if page is not None and page.file.src_uri == "api.md":
        html = re.sub(r"\bdocs/(\w+)\.md\b", titled_link, html)
    return html


def titled_link(match: re.Match) -> str:
    title = re.search(r"^# (.*)$", (ROOT / "docs" / f"{match[1]}.md").read_text(), re.MULTILINE)[1]
    return f'<a href="{match[1]}.html">{title}</a>'


def formula(match: re.Match) -> str:
    from latex2mathml.converter import convert

    tex = unescape(match["tex"]).strip()
    if match["tag"] == "span":
        return convert(tex, display="inline")
    return f'<div class="formula">{convert(tex, display="block")}</div>'  # on narrow screens the formula scrolls alone


def link(match: re.Match, folder: str) -> str:
    """The unchanged link if it leads to a page, otherwise its text."""
    text, target, anchor = match[1], match[2], match[3] or ""
    if target is None or "://" in target:  # code, or another site
        return match[0]
    path = posixpath.normpath(posixpath.join(folder, target))
    pages = {"DESIGN.md": "design.md", "CHANGELOG.md": "changelog.md", "README.md": "index.md", "docs": "index.md"}
    page = pages.get(path, path.removeprefix("docs/") if path.startswith("docs/") else None)
    if page is not None and (ROOT / "docs" / page).is_file():
        return f"[{text}]({page}{anchor})"
    return text if "`" in text else f"`{text}`"


def remaining_names(markdown: str) -> str:
    tree = ast.parse((ROOT / "flce_ops" / "__init__.py").read_text())
    (names,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    listed = {name.rsplit(".", 1)[1] for name in re.findall(r"^::: (\S+)$", markdown, re.MULTILINE)}
    return "\n\n".join(f"::: flce_ops.{name}" for name in names if name not in listed and not name.startswith("_"))
