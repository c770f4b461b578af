"""The runner of pages finds what is wrong with a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.dist.docs.pages import run_page


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("```python\nassert 1 + 1 == 3\n```\n", "AssertionError"),
        ("```python\n# lonely.py\nprint(1)\n```\n", "runs no command"),
        ("```python\n# examples/own_loop.py\nprint(1)\n```\n", "is not what"),
        ("```yaml\na: 1\n```\n", "nothing runs"),
        ("```console\n$ echo one\ntwo\n```\n", "printed no line"),
        ("```console\n$ python -c 'raise SystemExit(3)'\n```\n", "ended with 3"),
        ("```console\n$ echo one\n", "fences"),
    ],
)
def test_a_page_that_is_wrong_fails(text: str, complaint: str, tmp_path: Path) -> None:
    page, folder = tmp_path / "page.md", tmp_path / "folder"
    page.write_text(text)
    folder.mkdir()
    with pytest.raises(AssertionError, match=complaint):
        run_page(page, folder)


def test_a_page_that_is_right_gives_what_its_commands_printed(tmp_path: Path) -> None:
    page, folder = tmp_path / "page.md", tmp_path / "folder"
    page.write_text(
        "```python\n# two.py\nprint('two halves')\n```\n\n```console\n$ python two.py\ntwo ...\n```\n"
    )
    folder.mkdir()
    assert [ran.output for ran in run_page(page, folder)] == ["two halves\n"]
