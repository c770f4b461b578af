"""Handwritten digits: the one-device script of plain_loop.py, and the same on any number of workers in paceline_loop.py."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import paceline
from paceline.tasks.digits import read_digits

EPOCHS = 3


def accuracy(model, loader):
    model.eval()
    with torch.no_grad():
        right = sum((model(x).argmax(-1) == y).sum().item() for x, y in loader)
    model.train()
    return right / len(loader.dataset)


def main(run):
    images, labels = read_digits()
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Dropout(0.1), nn.Linear(128, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(images[:1437] / 16, labels[:1437]), batch_size=64, shuffle=True)
    test_loader = DataLoader(TensorDataset(images[1437:] / 16, labels[1437:]), batch_size=64)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(loader))
    model, optimizer, loader, scheduler = run.prepare(model, optimizer, loader, scheduler)
    for epoch in range(EPOCHS):
        for step in loader:
            optimizer.zero_grad()
            for x, y in step:
                step.backward(F.cross_entropy(model(x), y, reduction="none"))
            optimizer.step()
            scheduler.step()
        print(f"epoch {epoch}: accuracy {accuracy(model, test_loader):.4f}")


if __name__ == "__main__":
    paceline.launch(main, workers=2, shards=4)
