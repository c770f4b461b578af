"""A script of plain PyTorch that knows nothing of paceline: paceline run -n 2 examples/plain_ddp_script.py 50"""

import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()
model = DistributedDataParallel(nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
generator = torch.Generator().manual_seed(rank)
for _ in range(int(sys.argv[1])):
    x = torch.randn(32, 8, generator=generator)
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"rank {rank} of {size}, local rank {os.environ['LOCAL_RANK']}: loss {loss.item():.4f}")
dist.destroy_process_group()
