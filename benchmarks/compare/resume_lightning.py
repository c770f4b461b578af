import os
from pathlib import Path

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.nn import functional as F
from torch.utils.data import DataLoader
from work import BATCH, EPOCHS, SAVE_EVERY, Journal, classifier, digits

world, out = int(os.environ["WORLD_SIZE"]), Path(os.environ["COMPARE_OUT"])


class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.model = classifier()

    def on_fit_start(self):
        self.journal = Journal(self.global_rank)

    def training_step(self, batch, _):
        self.index, image, label = batch
        return F.cross_entropy(self.model(image), label)

    def on_train_batch_end(self, *_):
        self.journal.step(self.global_step, self.index)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


train, _ = digits()
task, last = Classifier(), out / "last.ckpt"
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=world,
    strategy="ddp",
    max_epochs=EPOCHS,
    logger=False,
    callbacks=[ModelCheckpoint(out, save_last=True, every_n_train_steps=SAVE_EVERY)],
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(task, DataLoader(train, BATCH // world, shuffle=True), ckpt_path=last if last.exists() else None)
task.journal.end(task.model)
