"""Draw `results/gpu.json` as `docs/gpu.svg`: the time of a step by contender, relative to the hand-written loop of its sitting.

    python benchmarks/plot_gpu.py

Of several sittings the newest counts, for each case and contender by itself.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from html import escape
from pathlib import Path

SOURCE = Path(__file__).with_name("results") / "gpu.json"
TARGET = Path(__file__).parents[1] / "docs" / "gpu.svg"
CASES = {
    "mlp": "MLP, 85 k parameters",
    "gpt": "GPT-2, 124 M",
    "accumulate": "GPT-2, 4 micro-batches",
    "large": "GPT, 1.3 B",
}
COLOURS = {"hand": "#9aa0a6", "accelerate": "#c58b3b", "paceline": "#2a6f97", "paceline numeric": "#7fb3d1"}
BAR, GAP, LEFT, SCALE = 18, 22, 190, 300
"""Pixels: a bar's height, the space between cases, where bars begin, the length of 1."""


def newest() -> dict[str, dict[str, float]]:
    """Return the ratio of each contender in each case."""
    found: dict[str, dict[str, float]] = {}
    for sitting in json.loads(SOURCE.read_text())["sittings"]:
        for case, contenders in sitting["cases"].items():
            for name, measured in contenders.items():
                found.setdefault(case, {})[name] = measured["time / hand"]
    return {case: found[case] for case in CASES if case in found}


def drawn(found: dict[str, dict[str, float]]) -> Iterator[str]:
    """Yield the lines of the picture."""
    rows = sum(map(len, found.values()))
    height = rows * BAR + len(found) * GAP + 30
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + SCALE + 140}" height="{height}" '
        'font-family="sans-serif" font-size="12">'
    )
    yield '<rect width="100%" height="100%" fill="white"/>'
    y = 10
    for case, contenders in found.items():
        yield f'<text x="10" y="{y + 14}" font-weight="bold">{escape(CASES[case])}</text>'
        for name in (one for one in COLOURS if one in contenders):
            ratio = contenders[name]
            yield f'<rect x="{LEFT}" y="{y + 2}" width="{ratio * SCALE:.1f}" height="{BAR - 4}" fill="{COLOURS[name]}"/>'
            yield f'<text x="{LEFT + ratio * SCALE + 6:.1f}" y="{y + 13}">{ratio:.2f} {escape(name)}</text>'
            y += BAR
        y += GAP
    line = LEFT + SCALE
    yield f'<line x1="{line}" y1="6" x2="{line}" y2="{y - 8}" stroke="#444" stroke-dasharray="3 3"/>'
    yield f'<text x="{LEFT}" y="{y + 8}">time of a step on one H200; the hand-written loop is 1</text></svg>'


if __name__ == "__main__":
    TARGET.write_text("\n".join(drawn(newest())) + "\n")
