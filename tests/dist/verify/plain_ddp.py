"""A plain DDP script that knows nothing of paceline; `--fault` breaks it in one of the well-known ways."""

from __future__ import annotations

import argparse
import contextlib

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader, Subset, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--fault", default="none")
parser.add_argument("--samples", type=int, default=24)
parser.add_argument("--batch", choices=("global", "local"), default="global")
options = parser.parse_args()
fault = options.fault

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()

inputs = torch.randn(options.samples, 5, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, inputs.sum(1, keepdim=True) + inputs[:, :1] ** 2)

if fault == "unseeded":
    torch.seed()
else:
    torch.manual_seed(rank if "weights" in fault else 0)
model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 1))
ddp = DistributedDataParallel(model, init_sync=fault != "unmasked weights")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
if fault == "hook":
    for parameter in model.parameters():
        parameter.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))

size = 8 // world if options.batch == "global" else 4
sampler = None
if fault == "no sampler":
    loader = DataLoader(data, batch_size=size)
elif fault == "split":
    part, _ = torch.utils.data.random_split(
        data, [len(data) // 2] * 2, generator=torch.Generator().manual_seed(rank)
    )
    loader = DataLoader(part, batch_size=size)
elif fault == "unequal":
    loader = DataLoader(Subset(data, range(rank, len(data), world)), batch_size=size)
else:
    sampler = DistributedSampler(data, world, rank)
    loader = DataLoader(data, batch_size=size, sampler=sampler)

for epoch in range(2):
    if sampler is not None and fault != "no set_epoch":
        sampler.set_epoch(epoch)
    for x, y in loader:
        optimizer.zero_grad()
        with ddp.no_sync() if fault == "max_grad_norm" else contextlib.nullcontext():
            loss = nn.functional.mse_loss(ddp(x), y)
            if fault == "constant":
                loss = nn.functional.mse_loss(ddp(x), y, reduction="sum") / 8
            loss.backward()
        if fault != "constant":
            clip_grad_norm_(model.parameters(), 0.5)
        if fault == "max_grad_norm":
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                parameter.grad /= world
        optimizer.step()
        for _ in range(world if fault == "schedule" else 1):
            scheduler.step()
    if fault == "schedule on one" and rank == 0:
        scheduler.step()

dist.destroy_process_group()
