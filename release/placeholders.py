"""Refuses a release whose project URLs are still placeholders: python -m release.placeholders

pyproject.toml is the one place that has them. A placeholder names a host that nobody can own: one in the domains that
RFC 2606 reserves (.invalid, .example, .test, .localhost, and example.com, .net and .org), however it is written.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
URLS = re.compile(r"^\[project\.urls\]$(.*?)(?=^\[|\Z)", re.DOTALL | re.MULTILINE)
ADDRESS = re.compile(r"""^\s*[\w"'. -]+=\s*(["'])(.*?)\1""", re.MULTILINE)
RESERVED = re.compile(r"(^|[./@])(invalid|example|test|localhost|example\.(com|net|org))\.?($|[:/?#])", re.IGNORECASE)


def main(project: Path = ROOT / "pyproject.toml") -> int:
    urls = URLS.search(project.read_text())
    addresses = [found[2] for found in ADDRESS.finditer(urls[1])] if urls else []
    placeholders = [address for address in addresses if RESERVED.search(host_of(address))]
    if placeholders or not addresses:
        print(
            f"no release: {project.name} has {'placeholders' if addresses else 'nothing'} in [project.urls]: "
            f"{', '.join(placeholders)}\n"
            "Put the repository's address there. For a build that nobody is to publish: make wheel",
            file=sys.stderr,
        )
    return 1 if placeholders or not addresses else 0


def host_of(address: str) -> str:
    """Without scheme and path: git@host:path and host/path have none of the one, mailto:user@host none of the other."""
    return re.split(r"[/?#]", address.split("://")[-1].strip(), maxsplit=1)[0]


if __name__ == "__main__":
    sys.exit(main())
