"""Which device a worker computes on, and which backend carries its tensors."""

from __future__ import annotations

import torch

from paceline.errors import InputError, UnknownNameError

BACKENDS = ("gloo", "nccl", "mpi")
DEVICES = ("auto", "cpu", "cuda")
# Host tensors travel over gloo even where the devices have nccl: seeds, sizes and verdicts never touch a GPU.
NCCL = "cpu:gloo,cuda:nccl"


def choose_device(request: str, local_rank: int) -> torch.device:
    """Pick the device of one worker; with CUDA, workers of a node take its GPUs in turn."""
    if request not in DEVICES:
        raise UnknownNameError("device", request, DEVICES)
    if request == "cpu" or (request == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise InputError(
            "device 'cuda' was asked for, but torch sees no GPU here. Use --device cpu, or check the driver."
        )
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def choose_backend(request: str, device: torch.device, local_size: int) -> str:
    """Pick what carries the tensors of workers on this device: torch's backend string, or "mpi".

    NCCL refuses two ranks on one GPU. With more workers than GPUs, "auto" therefore takes gloo, which carries
    CUDA tensors through host memory: slower (1.4 GB/s at 64 MB on an H200), but it works.
    """
    if request not in ("auto", *BACKENDS):
        raise UnknownNameError("backend", request, ("auto", *BACKENDS))
    if request == "mpi":
        return "mpi"
    if request == "gloo" or (request == "auto" and device.type == "cpu"):
        return "gloo"
    if device.type == "cpu":
        raise InputError(
            "backend 'nccl' needs CUDA tensors, but this worker computes on the CPU. Use --backend gloo."
        )
    devices = torch.cuda.device_count()
    if local_size <= devices:
        return NCCL
    if request == "nccl":
        raise InputError(
            f"backend 'nccl' allows one worker a GPU, but {local_size} workers share {devices}. "
            f"Use --backend gloo, or at most {devices} workers a node."
        )
    return "gloo"
