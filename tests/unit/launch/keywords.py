"""Writes the fields of `LaunchOptions` from the classes of options: `python -m tests.unit.launch.keywords`."""

from pathlib import Path

from paceline.launch import in_python, keywords

WIDER = {"out": "str | Path | None", "tuning": "Mapping[str, Any] | Tuning"}
"""What a call may give beside the type that is kept."""
FILE = Path(keywords.__file__)


def generated() -> str:
    above, docstring, _ = FILE.read_text(encoding="utf-8").partition('"""Every option of a run."""\n')
    written = (
        f"    {name}: {WIDER.get(name, one.type)}\n" for name, (one, _) in in_python.keywords().items()
    )
    return f"{above}{docstring}\n{''.join(written)}"


if __name__ == "__main__":
    FILE.write_text(generated(), encoding="utf-8")
