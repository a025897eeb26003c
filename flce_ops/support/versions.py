"""The oldest torch and Triton that the package runs with. An older version raises an error, which names it, when it is
imported.
"""

import re

import torch

OLDEST = {"torch": (2, 11), "triton": (3, 6)}


def check_version(library: str, version: str) -> None:
    found = re.match(r"(\d+)\.(\d+)", version)
    oldest = OLDEST[library]
    if found is not None and tuple(map(int, found.groups())) < oldest:
        wanted = ".".join(map(str, oldest))
        raise ImportError(
            f'flce_ops: expected {library} {wanted} or later, got {version}; pip install -U "{library}>={wanted}"'
        )


check_version("torch", torch.__version__)
