import os

import lightning
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader
from work import BATCH, EPOCHS, Journal, classifier, digits

world = int(os.environ["WORLD_SIZE"])


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

    def validation_step(self, batch, _):
        _, image, label = batch
        right = (self.model(image).argmax(-1) == label).float().mean()
        self.log("accuracy", right, on_epoch=True, sync_dist=True, batch_size=len(label))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=3e-3)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=int(steps))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


train, held_out = digits()
task = Classifier()
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=world,
    strategy="ddp",
    max_epochs=EPOCHS,
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=0,
    check_val_every_n_epoch=EPOCHS,
)
trainer.fit(task, DataLoader(train, BATCH // world, shuffle=True), DataLoader(held_out, BATCH // world))
task.journal.end(task.model, accuracy=float(trainer.callback_metrics["accuracy"]))
