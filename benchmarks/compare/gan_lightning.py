import os

import lightning
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from work import BATCH, EPOCHS, Journal, digits, discriminator, generator

world = int(os.environ["WORLD_SIZE"])


class Gan(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.maker, self.judge, self.number = generator(), discriminator(), 0

    def on_fit_start(self):
        self.journal = Journal(self.global_rank)
        torch.manual_seed(self.global_rank)

    def training_step(self, batch, _):
        maker_optimizer, judge_optimizer = self.optimizers()
        index, image, _ = batch
        real, fake = torch.ones(len(image), 1), torch.zeros(len(image), 1)
        self.toggle_optimizer(judge_optimizer)
        made = self.maker(torch.randn(len(image), 16))
        loss = F.binary_cross_entropy_with_logits(
            self.judge(torch.cat([image.flatten(1), made.detach()])), torch.cat([real, fake])
        )
        judge_optimizer.zero_grad()
        self.manual_backward(loss)
        judge_optimizer.step()
        self.untoggle_optimizer(judge_optimizer)
        self.toggle_optimizer(maker_optimizer)
        made = self.maker(torch.randn(len(image), 16))
        loss = F.binary_cross_entropy_with_logits(self.judge(made), real)
        maker_optimizer.zero_grad()
        self.manual_backward(loss)
        maker_optimizer.step()
        self.untoggle_optimizer(maker_optimizer)
        self.number += 1
        self.journal.step(self.number, index)

    def configure_optimizers(self):
        return (
            torch.optim.Adam(self.maker.parameters(), lr=1e-3),
            torch.optim.Adam(self.judge.parameters(), lr=1e-3),
        )


train, _ = digits()
task = Gan()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=world,
    strategy="ddp_find_unused_parameters_true",
    max_epochs=EPOCHS,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(task, DataLoader(train, BATCH // world, shuffle=True))
task.journal.end(task.maker, task.judge)
