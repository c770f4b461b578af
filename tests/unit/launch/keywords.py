"""Writes the fields of `LaunchOptions` and `TrainOptions` from the classes of options: `python -m tests.unit.launch.keywords`."""

from pathlib import Path

from paceline.launch import in_python, keywords

WIDER = {
    "out": "str | Path | None",
    "sink": "str | type | Sequence[str | type] | None",
    "tuning": "Mapping[str, Any] | Tuning",
}
"""What a call may give beside the type that is kept."""
FILE = Path(keywords.__file__)


def generated() -> str:
    text = FILE.read_text(encoding="utf-8")
    above, docstring, _ = text.partition('"""Every option of a run."""\n')
    between = "\n\nclass TrainOptions(LaunchOptions, total=False):\n"
    below = '    """Those that a Task has beside them."""\n'
    every, of_run = in_python.keywords(in_python.OF_TASK), in_python.keywords()
    more = {name: one for name, one in every.items() if name not in of_run}
    return f"{above}{docstring}\n{_written(of_run)}{between}{below}\n{_written(more)}"


def _written(keywords):
    return "".join(f"    {name}: {WIDER.get(name, one.type)}\n" for name, (one, _) in keywords.items())


if __name__ == "__main__":
    FILE.write_text(generated(), encoding="utf-8")
