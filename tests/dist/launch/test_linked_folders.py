"""Scripts behind links: workers have the `__file__` that the launching process has."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
from pathlib import Path
import paceline
ROOT = Path(__file__).parent
def main(run):
    return str(ROOT)
if __name__ == "__main__":
    print(*paceline.launch(main, workers=2))
"""


@pytest.mark.parametrize("linked", ["folder", "file"])
def test_a_script_behind_a_link(linked: str, tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.mkdir()
    (real / "script.py").write_text(SCRIPT)
    link = tmp_path / "link"
    if linked == "folder":
        link.symlink_to(real)
    else:
        link.mkdir()
        (link / "script.py").symlink_to(real / "script.py")
    done = subprocess.run(
        [sys.executable, str(link / "script.py")], capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert done.stdout == f"{link} {link}\n"
