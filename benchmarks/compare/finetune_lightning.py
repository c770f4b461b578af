import os

import lightning
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from work import PADDING, Journal, Reader, sequences

world, passes = int(os.environ["WORLD_SIZE"]), 4


class FineTune(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.samples = Reader(), []

    def on_fit_start(self):
        self.journal = Journal(self.global_rank)

    def training_step(self, batch, _):
        index, tokens, labels = batch
        self.samples += index.tolist()
        logits = self.model(tokens)
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PADDING)

    def on_train_epoch_end(self):
        self.journal.step(self.global_step, self.samples)
        self.samples = []

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


data, task = sequences(), FineTune()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=world,
    strategy="ddp",
    max_epochs=20,
    accumulate_grad_batches=passes,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(task, DataLoader(data, len(data) // world // passes, shuffle=True))
task.journal.end(task.model)
