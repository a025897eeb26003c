"""The metadata is in pyproject.toml. Here the relative links of README.md become absolute in the long description: an
index could not follow them. They lead to the release's tag in the repository, whose address is Homepage there.
"""

import re

from setuptools import Distribution, setup

CODE = r"```.*?```|`[^`\n]+`"
LINK = re.compile(CODE + r"|(?P<image>!?)(?P<text>\[[^\]]*\])\((?!\w+:|#)(?P<path>[^)\s]+)\)", re.DOTALL)


def with_absolute_links(text, repository, tag):
    def absolute(match):
        if match["path"] is None:  # code
            return match[0]
        view = "raw" if match["image"] else "blob"
        return f"{match['image']}{match['text']}({repository.rstrip('/')}/{view}/{tag}/{match['path']})"

    return LINK.sub(absolute, text)


class WithAbsoluteLinks(Distribution):
    def parse_config_files(self, *args, **options):
        super().parse_config_files(*args, **options)
        metadata = self.metadata
        repository, tag = metadata.project_urls["Homepage"], f"v{metadata.version}"
        metadata.long_description = with_absolute_links(metadata.long_description, repository, tag)


setup(distclass=WithAbsoluteLinks)
