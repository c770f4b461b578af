import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.nn import functional as F
from torch.utils.data import DataLoader
from work import BATCH, EPOCHS, Journal, digits, discriminator, generator

accelerator = Accelerator(cpu=True)
journal = Journal(accelerator.process_index)
train, _ = digits()
loader = DataLoader(train, BATCH // accelerator.num_processes, shuffle=True)
maker, judge = generator(), discriminator()
maker_optimizer = torch.optim.Adam(maker.parameters(), lr=1e-3)
judge_optimizer = torch.optim.Adam(judge.parameters(), lr=1e-3)
maker, judge, maker_optimizer, judge_optimizer, loader = accelerator.prepare(
    maker, judge, maker_optimizer, judge_optimizer, loader
)
set_seed(0, device_specific=True)
number = 0
for _ in range(EPOCHS):
    for index, image, _ in loader:
        real, fake = torch.ones(len(image), 1), torch.zeros(len(image), 1)
        made = maker(torch.randn(len(image), 16))
        loss = F.binary_cross_entropy_with_logits(
            judge(torch.cat([image.flatten(1), made.detach()])), torch.cat([real, fake])
        )
        judge_optimizer.zero_grad()
        accelerator.backward(loss)
        judge_optimizer.step()
        made = maker(torch.randn(len(image), 16))
        loss = F.binary_cross_entropy_with_logits(judge(made), real)
        maker_optimizer.zero_grad()
        accelerator.backward(loss)
        maker_optimizer.step()
        number += 1
        journal.step(number, index)
journal.end(maker, judge)
accelerator.end_training()
