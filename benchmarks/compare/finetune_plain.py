import contextlib

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from work import PADDING, Journal, Reader, sequences

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
journal = Journal(rank)
data, passes = sequences(), 4
sampler = DistributedSampler(data)
loader = DataLoader(data, len(data) // world // passes, sampler=sampler)
model = DistributedDataParallel(Reader())
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
for epoch in range(20):
    sampler.set_epoch(epoch)
    samples = []
    for number, (index, tokens, labels) in enumerate(loader, 1):
        with contextlib.nullcontext() if number == passes else model.no_sync():
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PADDING)
            (loss / passes).backward()
        samples += index.tolist()
    optimizer.step()
    optimizer.zero_grad()
    journal.step(epoch + 1, samples)
journal.end(model)
dist.destroy_process_group()
