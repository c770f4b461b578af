import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from work import BATCH, EPOCHS, Journal, classifier, digits

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
journal = Journal(rank)
train, held_out = digits()
sampler = DistributedSampler(train)
loader = DataLoader(train, BATCH // world, sampler=sampler)
model = DistributedDataParallel(classifier())
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=EPOCHS * len(loader))
number = 0
for epoch in range(EPOCHS):
    model.train()
    sampler.set_epoch(epoch)
    for index, image, label in loader:
        loss = F.cross_entropy(model(image), label)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        number += 1
        journal.step(number, index)
model.eval()
counts = torch.zeros(2)
with torch.no_grad():
    for _, image, label in DataLoader(
        held_out, BATCH // world, sampler=DistributedSampler(held_out, shuffle=False)
    ):
        counts += torch.tensor([(model(image).argmax(-1) == label).sum(), len(label)])
dist.all_reduce(counts)
journal.end(model, counted=int(counts[1]), accuracy=float(counts[0] / counts[1]))
dist.destroy_process_group()
