"""Code that lies in no file: cells of a notebook, executed in a real kernel, and standard input."""

import os
import re
import subprocess
import sys

import nbformat
import pytest
from nbclient import NotebookClient

from tests.dist.launch import cells
from tests.patience import HANG_S


def outputs(cell, kind):
    return [one for one in cell.outputs if one.output_type == kind]


def printed(cell):
    return "".join(one.text for one in outputs(cell, "stream"))


@pytest.fixture
def kernel_folders(tmp_path, monkeypatch):
    """Have a kernel write nothing into the user's home."""
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))


def test_a_notebook_trains_what_its_cells_define(tmp_path, kernel_folders):
    sources = (
        *(cells.DEFINED, cells.ONE, cells.KILLED, cells.LAUNCHED),
        *(cells.FAILS, cells.STOPPED, cells.RESUMED),
    )
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])
    client = NotebookClient(
        notebook,
        timeout=HANG_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(tmp_path)}},
        allow_errors=True,
    )
    client.execute()
    _, one, killed, launched, fails, stopped, resumed = notebook.cells
    for cell in (one, killed, launched, resumed):
        assert not outputs(cell, "error"), cell.outputs

    # One output that was replaced, and nothing beside it.
    (shown,) = outputs(one, "display_data")
    lines = shown.data["text/plain"].splitlines()
    assert lines[0].startswith("Lines: ddp on 1 worker")
    assert [line[:19] for line in lines[1:]] == ["evaluated at step 4", "evaluated at step 8"]
    assert printed(one) == ""
    (result,) = outputs(killed, "execute_result")
    assert "<table>" in result.data["text/html"]
    assert "1 restart" in result.data["text/plain"]
    assert printed(launched).strip() == "(Seen(rank=0, total=117), Seen(rank=1, total=117))"

    # An error, once, with the line of the cell.
    (error,) = outputs(fails, "error")
    text = re.sub(r"\x1b\[[0-9;]*m", "", "\n".join(error.traceback))
    assert (error.ename, text.count("NameError: name 'wrong_name' is not defined")) == (
        "WorkerFailedError",
        1,
    )
    assert text.count("return wrong_name") <= 2  # in the cell that is shown, and in the worker's traceback
    assert "in_python" not in text
    everything = str(fails.outputs[:-1])
    assert "wrong_name" not in everything

    # An interrupt saves; the kernel goes on, to the same bits.
    (error,) = outputs(stopped, "error")
    assert error.ename == "KeyboardInterrupt"
    assert re.search(r"paceline\.resume\('stopped', task=\.\.\.\) goes on from there", printed(stopped))
    assert "does not say which task it trains: it was sent as a value" in printed(resumed)


def test_standard_input_is_a_script_without_a_file(tmp_path):
    source = "".join((cells.DEFINED, cells.LAUNCHED, cells.ONE, "print(one.history)\n"))
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-"],
        input=source,
        capture_output=True,
        text=True,
        timeout=HANG_S,
        check=False,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.splitlines() == [
        "(Seen(rank=0, total=117), Seen(rank=1, total=117))",
        "History(losses of 8 steps; evaluations after steps: 4, 8)",
    ]
