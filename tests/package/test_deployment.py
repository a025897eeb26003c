"""The Python blocks of docs/deployment.md, run in order as one program."""

import re
from pathlib import Path

import pytest

DEPLOYMENT = Path(__file__).parents[2] / "docs" / "deployment.md"


@pytest.mark.exhaustive  # compiles C++
def test_code_of_the_deployment_guide_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", DEPLOYMENT.read_text(), re.DOTALL):
        exec(compile(block, str(DEPLOYMENT), "exec"), names)
    assert {path.name for path in tmp_path.iterdir()} == {"loss.pt2", "packaged_loss.pt2"}
