"""From the last step to the end of the process, with a final checkpoint: `paceline train` against torch.save of the same state.

    python benchmarks/final_save.py [--size small|large] [--rounds 1] [--folder DIR] [--write]

  torch.save          a hand-written loop that ends with torch.save of the model's and the optimizer's state
  torch.save, synced  the same, and waits until the file is on the disk (os.fsync), as paceline does
  paceline            `paceline train` of the same task, with everything that it writes at the end: the checkpoint with its
                      checksums, the hash of the weights and the receipt

Each is a process of its own, in turns; the clock runs from the last step's end on the device to the end of the process.
`large` is gpu.py's model of 1.3 B parameters (16 GB of state), which wants a GPU and twice as much room on the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import paceline
from gpu import CASES, Gpt2

RESULT = Path(__file__).with_name("results") / "final_save.json"
CONTENDERS = ("torch.save", "torch.save, synced", "paceline")
STEPS = 3


class Big(paceline.Task):
    """A few steps of a large model, or of a small one."""

    name = "final-save"
    batch_size = 2
    precision = "bf16"

    def __init__(self, size: str = "small", mark: str = "") -> None:
        self.size, self.mark = size, mark

    def model(self) -> nn.Module:
        """Return gpu.py's model, or one of 3 M parameters."""
        return CASES["large"].model() if self.size == "large" else Gpt2(128, 2, 4, 128, 20000)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """Return AdamW, two numbers of state for each weight."""
        return torch.optim.AdamW(model.parameters(), lr=1e-4)

    def train_data(self) -> TensorDataset:
        """Return random tokens."""
        length = 1024 if self.size == "large" else 128
        ids = torch.randint(20000, (STEPS * self.batch_size, length + 1))
        return TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())

    def loss(self, model: nn.Module, batch: Any) -> paceline.Loss:
        """Return the loss of all tokens."""
        return paceline.Loss.mean(CASES["gpt"].losses(model, batch))

    def on_step(self, info: paceline.StepInfo) -> None:
        """Start the clock behind the last step."""
        if info.number == STEPS:
            start_clock(Path(self.mark))


def start_clock(mark: Path) -> None:
    """Write down when the device has ended what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    mark.write_text(repr(time.time()))


def by_hand(size: str, mark: Path, file: Path, *, synced: bool) -> None:
    """Train as one would by hand, and save at the end."""
    task = Big(size)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = task.model().to(device)
    optimizer = task.optimizer(model)
    for batch in torch.utils.data.DataLoader(task.train_data(), batch_size=task.batch_size):
        with torch.autocast(device, torch.bfloat16):
            loss = task.loss(model, [one.to(device) for one in batch])
        optimizer.zero_grad()
        (loss.total / loss.weight).backward()
        optimizer.step()
    start_clock(mark)
    with file.open("wb") as out:
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, out)
        if synced:
            out.flush()
            os.fsync(out.fileno())


def command(contender: str, size: str, folder: Path) -> list[str]:
    """Return what runs one contender."""
    mark = folder / "mark"
    if contender != "paceline":
        return [sys.executable, __file__, "--one", contender, size, str(mark), str(folder / "state.pt")]
    options = [f"--set=size={size}", f"--set=mark={mark}", f"--out={folder / 'run'}", "--epochs=1"]
    return [sys.executable, "-m", "paceline", "train", f"{__file__}:Big", "--strategy=single", *options]


def measure(contender: str, size: str, where: str | None) -> dict[str, float]:
    """Return the seconds from the last step to the end, and how much was written."""
    folder = Path(tempfile.mkdtemp(prefix="final-save-", dir=where))
    try:
        subprocess.run(command(contender, size, folder), check=True, stdout=subprocess.DEVNULL)
        ended = time.time()
        written = sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())
        return {"s": round(ended - float((folder / "mark").read_text()), 3), "gb": round(written / 1e9, 3)}
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """Run the contenders in turns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", choices=("small", "large"), default="small")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--folder", help="the disk to write to; default: a temporary folder")
    parser.add_argument("--write", action="store_true", help="write the result beside this script")
    parser.add_argument("--one", nargs=4, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        contender, size, mark, file = given.one
        by_hand(size, Path(mark), Path(file), synced=contender.endswith("synced"))
        return
    seen: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    for _ in range(given.rounds):
        for name in CONTENDERS:
            seen[name].append(measure(name, given.size, given.folder))
            print(f"{name:20} {seen[name][-1]['s']:8.2f} s  {seen[name][-1]['gb']:.2f} GB", flush=True)
    base = seen["torch.save"]
    found = {
        name: {
            "median_s": statistics.median(one["s"] for one in rows),
            "gb": rows[0]["gb"],
            "time / torch.save": round(
                statistics.median(one["s"] / other["s"] for one, other in zip(rows, base, strict=True)), 3
            ),
        }
        for name, rows in seen.items()
    }
    print(json.dumps(found, indent=1))
    if given.write:
        about = {
            "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
            "cpus": os.cpu_count(),
            "torch": torch.__version__,
            "size": given.size,
            "rounds": given.rounds,
        }
        RESULT.write_text(json.dumps({"about": about, "contenders": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
