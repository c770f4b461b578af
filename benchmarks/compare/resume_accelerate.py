import os
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch.nn import functional as F
from torch.utils.data import DataLoader
from work import BATCH, EPOCHS, SAVE_EVERY, Journal, classifier, digits

out = Path(os.environ["COMPARE_OUT"])
project = ProjectConfiguration(project_dir=out, automatic_checkpoint_naming=True)
accelerator = Accelerator(cpu=True, project_config=project)
journal = Journal(accelerator.process_index)
train, _ = digits()
loader = DataLoader(train, BATCH // accelerator.num_processes, shuffle=True)
model = classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=EPOCHS * len(loader))
model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
number = 0
saved = sorted((out / "checkpoints").glob("checkpoint_*"), key=lambda one: int(one.name.partition("_")[2]))
if saved:
    accelerator.load_state(str(saved[-1]))
    number = SAVE_EVERY * len(saved)
    project.iteration = len(saved)
per_epoch = len(loader)
for epoch in range(number // per_epoch, EPOCHS):
    done = number - epoch * per_epoch
    for index, image, label in accelerator.skip_first_batches(loader, done) if done else loader:
        loss = F.cross_entropy(model(image), label)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        schedule.step()
        number += 1
        if number % SAVE_EVERY == 0:
            accelerator.save_state()
        journal.step(number, index)
journal.end(model)
accelerator.end_training()
