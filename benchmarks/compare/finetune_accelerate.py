import torch
from accelerate import Accelerator
from torch.nn import functional as F
from torch.utils.data import DataLoader
from work import PADDING, Journal, Reader, sequences

passes = 4
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=passes)
journal = Journal(accelerator.process_index)
data = sequences()
loader = DataLoader(data, len(data) // accelerator.num_processes // passes, shuffle=True)
model = Reader()
optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
for epoch in range(20):
    samples = []
    for index, tokens, labels in loader:
        with accelerator.accumulate(model):
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=PADDING)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        samples += index.tolist()
    journal.step(epoch + 1, samples)
journal.end(model)
accelerator.end_training()
