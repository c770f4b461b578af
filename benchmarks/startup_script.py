"""A plain DDP script that notes when its first optimizer step is done; startup.py runs it under each launcher."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

dist.init_process_group("gloo")
model = DistributedDataParallel(nn.Linear(20, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
model(torch.randn(32, 20)).sum().backward()
optimizer.step()
if dist.get_rank() == 0:
    Path(sys.argv[1]).write_text(str(time.time()))
dist.destroy_process_group()
