import torch
import torch.distributed as dist
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from work import BATCH, EPOCHS, Journal, digits, discriminator, generator

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
journal = Journal(rank)
train, _ = digits()
sampler = DistributedSampler(train)
loader = DataLoader(train, BATCH // world, sampler=sampler)
maker, judge = DistributedDataParallel(generator()), DistributedDataParallel(discriminator())
maker_optimizer = torch.optim.Adam(maker.parameters(), lr=1e-3)
judge_optimizer = torch.optim.Adam(judge.parameters(), lr=1e-3)
torch.manual_seed(rank)
number = 0
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for index, image, _ in loader:
        real, fake = torch.ones(len(image), 1), torch.zeros(len(image), 1)
        made = maker(torch.randn(len(image), 16))
        loss = F.binary_cross_entropy_with_logits(
            judge(torch.cat([image.flatten(1), made.detach()])), torch.cat([real, fake])
        )
        judge_optimizer.zero_grad()
        loss.backward()
        judge_optimizer.step()
        made = maker(torch.randn(len(image), 16))
        loss = F.binary_cross_entropy_with_logits(judge(made), real)
        maker_optimizer.zero_grad()
        loss.backward()
        maker_optimizer.step()
        number += 1
        journal.step(number, index)
journal.end(maker, judge)
dist.destroy_process_group()
