"""Refuses a release whose project URLs are still placeholders: python -m release.placeholders

pyproject.toml is the one place that has them. A placeholder is a URL below .invalid, a domain that nobody can own.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PLACEHOLDER = re.compile(r"""https?://[\w.-]*\.invalid(?=[:/"'])[^"']*""")


def main(project: Path = ROOT / "pyproject.toml") -> int:
    found = PLACEHOLDER.findall(project.read_text())
    if found:
        print(
            f"no release: {project.name} has placeholders in [project.urls]: {', '.join(found)}\n"
            "Put the repository's address there. For a build that nobody is to publish: make wheel",
            file=sys.stderr,
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
