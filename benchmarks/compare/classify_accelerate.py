import torch
from accelerate import Accelerator
from torch.nn import functional as F
from torch.utils.data import DataLoader
from work import BATCH, EPOCHS, Journal, classifier, digits

accelerator = Accelerator(cpu=True)
journal = Journal(accelerator.process_index)
train, held_out = digits()
loader = DataLoader(train, BATCH // accelerator.num_processes, shuffle=True)
eval_loader = DataLoader(held_out, BATCH // accelerator.num_processes)
model = classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=EPOCHS * len(loader))
model, optimizer, loader, eval_loader, schedule = accelerator.prepare(
    model, optimizer, loader, eval_loader, schedule
)
number = 0
for _ in range(EPOCHS):
    model.train()
    for index, image, label in loader:
        loss = F.cross_entropy(model(image), label)
        optimizer.zero_grad()
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        number += 1
        journal.step(number, index)
model.eval()
right = counted = 0
with torch.no_grad():
    for _, image, label in eval_loader:
        answer, truth = accelerator.gather_for_metrics((model(image).argmax(-1), label))
        right, counted = right + int((answer == truth).sum()), counted + len(truth)
journal.end(model, counted=counted, accuracy=right / counted)
accelerator.end_training()
