import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Subset
from work import BATCH, EPOCHS, SAVE_EVERY, Journal, classifier, digits

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
journal = Journal(rank)
train, _ = digits()
sampler = DistributedSampler(train)
share, per_epoch = BATCH // world, len(DataLoader(train, BATCH // world, sampler=sampler))
model = DistributedDataParallel(classifier())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=EPOCHS * per_epoch)
path = Path(os.environ["COMPARE_OUT"], "last.pt")
number = 0
if path.exists():
    saved = torch.load(path)
    number = saved["number"]
    for name, one in (("model", model), ("optimizer", optimizer), ("schedule", schedule)):
        one.load_state_dict(saved[name])
for epoch in range(number // per_epoch, EPOCHS):
    sampler.set_epoch(epoch)
    order, done = list(sampler), number - epoch * per_epoch
    for index, image, label in DataLoader(Subset(train, order[done * share :]), share):
        loss = F.cross_entropy(model(image), label)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        number += 1
        if number % SAVE_EVERY == 0 and rank == 0:
            states = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "schedule": schedule.state_dict(),
            }
            torch.save({"number": number, **states}, path.with_suffix(".part"))
            path.with_suffix(".part").replace(path)
        journal.step(number, index)
journal.end(model)
dist.destroy_process_group()
