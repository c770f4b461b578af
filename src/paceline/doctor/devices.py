"""Devices and backends: what torch sees, read in a worker that has torch loaded, and what to make of it."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from paceline.doctor.finding import Finding, fail, ok, warn
from paceline.world import env

DRIVER = Path("/proc/driver/nvidia/version")
GIB = 2**30


@dataclass(frozen=True)
class ReadTorch:
    """Return what torch sees of this machine: its devices, and the backends that it was built with."""

    def __call__(self, worker: object) -> dict[str, Any]:  # noqa: ARG002  (it joins no group)
        """Look, and keep what torch warns of."""
        import torch
        import torch.distributed as dist

        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            devices = [_device(number) for number in range(torch.cuda.device_count())]
            torch.zeros(1).numpy()  # says so where torch was built for another numpy
        return {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "nccl": _nccl_version() if dist.is_nccl_available() else None,
            "devices": devices,
            "backends": {
                "gloo": dist.is_gloo_available(),
                "nccl": dist.is_nccl_available(),
                "mpi": dist.is_mpi_available(),
            },
            "warnings": [str(one.message).splitlines()[0] for one in warned],
        }


def _nccl_version() -> str:
    import torch

    return ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]


def _device(number: int) -> dict[str, Any]:
    """Compute something on a device, so that one which does not work is found now."""
    import torch

    name = torch.cuda.get_device_name(number)
    try:
        free, total = torch.cuda.mem_get_info(number)
        works = torch.ones(8, device=f"cuda:{number}").sum().item() == 8
    except RuntimeError as error:
        return {"name": name, "error": str(error).splitlines()[0]}
    capability = ".".join(map(str, torch.cuda.get_device_capability(number)))
    wrong = {} if works else {"error": "the sum of eight ones is not eight"}
    return {"name": name, "free": free, "total": total, "capability": capability, **wrong}


@dataclass(frozen=True)
class ReduceAlone:
    """Form a group of one over a backend and reduce in it: all that one GPU can show of NCCL."""

    backend: str

    def __call__(self, worker: object) -> list[float]:  # noqa: ARG002  (it joins no other group)
        """Return what was summed."""
        import torch
        import torch.distributed as dist

        torch.cuda.set_device(0)
        dist.init_process_group(self.backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        try:
            mine = torch.arange(4.0, device="cuda")
            dist.all_reduce(mine)
            summed: list[float] = mine.tolist()
            return summed
        finally:
            dist.destroy_process_group()


def devices(seen: Mapping[str, Any]) -> list[Finding]:
    """Look at the GPUs, and where there are some that torch does not see, at why."""
    found = [
        warn("devices", f"torch warns: {text}", "Install a torch that fits this driver, GPU and numpy.")
        for text in seen["warnings"]
    ]
    there, driver = seen["devices"], _driver()
    if not there:
        return [*found, *_without_gpu(seen, driver)]
    about = f"CUDA {seen['cuda']}, NCCL {seen['nccl']}, driver {driver or 'unknown'}"
    for number, one in enumerate(there):
        if "error" in one:
            remedy = (
                "Look at nvidia-smi; leave it out with CUDA_VISIBLE_DEVICES, or install a torch that fits it."
            )
            what = f"GPU {number} ({one['name']}) cannot be used: {one['error']}"
            found.append(fail("devices", what, remedy, **one))
        elif one["free"] < one["total"] / 2:
            what = f"GPU {number} ({one['name']}) has {one['free'] / GIB:.1f} GiB free of {one['total'] / GIB:.1f}"
            remedy = "Another process holds the rest: nvidia-smi shows which."
            found.append(warn("devices", what, remedy, **one))
        else:
            what = f"GPU {number}: {one['name']}, {one['total'] / GIB:.1f} GiB; {about}"
            found.append(ok("devices", what, **one))
    return found


def _without_gpu(seen: Mapping[str, Any], driver: str | None) -> list[Finding]:
    hidden = env.read("CUDA_VISIBLE_DEVICES")
    if driver is None:
        return [ok("devices", "no GPU: workers compute on the CPU")]
    if seen["cuda"] is None:
        what = f"there is an NVIDIA driver ({driver}), but torch {seen['torch']} was built without CUDA"
        remedy = "Install torch with CUDA (https://pytorch.org/get-started), or train on the CPU."
    elif hidden is not None:
        what = f"there is an NVIDIA driver ({driver}), but CUDA_VISIBLE_DEVICES is {hidden!r}"
        remedy = "Unset it, or name the GPUs to use."
    else:
        what = f"torch {seen['torch']} for CUDA {seen['cuda']} sees no GPU of the NVIDIA driver {driver}"
        remedy = "Update the driver, or install a torch for an older CUDA; in a container, pass the GPUs in (--gpus all)."
    return [warn("devices", what, remedy)]


def _driver() -> str | None:
    try:
        words = DRIVER.read_text().splitlines()[0].split()
    except (OSError, IndexError):
        return None
    return next((word for word in words if word[0].isdigit()), None)
