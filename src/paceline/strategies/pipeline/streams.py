"""Random streams that go on from stage to stage: where torch's generators stand, as bytes that travel.

(Those of numpy and of Python's `random` begin at the shard's seed on every stage.)
"""

from __future__ import annotations

import torch

from paceline.world import seeds


def streams(device: torch.device) -> bytes:
    """Give where torch's random streams stand."""
    states = [torch.default_generator.get_state()]
    if device.type == "cuda":
        states.append(torch.cuda.default_generators[device.index or 0].get_state())
    return b"".join(state.numpy().tobytes() for state in states)


def set_streams(state: bytes, device: torch.device) -> None:
    """Go on from where the streams stood."""
    host = torch.default_generator.get_state().numel()
    raw = torch.frombuffer(bytearray(state), dtype=torch.uint8)
    torch.default_generator.set_state(raw[:host])
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].set_state(raw[host:].clone())


def begin_streams(seed: int, state: bytes | None, device: torch.device) -> None:
    """Begin at a seed, or go on from where the streams stood."""
    seeds.seed_everything(seed)
    if state is not None:
        set_streams(state, device)
