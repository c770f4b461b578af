"""A small ResNet on images: augmentation, label smoothing, warm-up and cosine for each step, bf16.

paceline train examples/image_classification.py:Images --workers 2 --precision bf16
"""

import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import paceline


class Shapes(Dataset):
    """Noisy images of 3 x 16 x 16 with a bar, a cross or a square; put your own in their place."""

    def __init__(self, count, seed, augment):
        generator = torch.Generator().manual_seed(seed)
        self.labels = torch.randint(3, (count,), generator=generator)
        self.images = 0.3 * torch.randn(count, 3, 16, 16, generator=generator)
        for image, label in zip(self.images, self.labels, strict=True):
            top, left = torch.randint(8, (2,), generator=generator).tolist()
            patch = image[:, top : top + 8, left : left + 8]
            if label == 0:
                patch[:, 3:5] += 1
            elif label == 1:
                patch[:, 3:5] += 1
                patch[:, :, 3:5] += 1
            else:
                patch += 1
        self.augment = augment

    def __len__(self):
        return len(self.labels)

    def __getitem__(self, index):
        image = self.images[index]
        if self.augment:  # what is drawn here is the shard's: the same on any number of workers
            if torch.rand(()) < 0.5:
                image = image.flip(-1)
            row, column = torch.randint(5, (2,)).tolist()
            image = F.pad(image, (2, 2, 2, 2))[:, row : row + 16, column : column + 16]
        return image, self.labels[index]


class Block(nn.Module):
    """Two convolutions beside a way round them."""

    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
        )
        same = stride == 1 and inputs == outputs
        self.round = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x):
        return F.relu(self.body(x) + self.round(x))


class Images(paceline.Task):
    batch_size = 64
    shards = 4
    epochs = 8

    def __init__(self, lr: float = 0.2, width: int = 8, samples: int = 512, warm_up: float = 0.1):
        self.lr, self.width, self.samples, self.warm_up = lr, width, samples, warm_up

    def model(self):
        w = self.width
        return nn.Sequential(
            nn.Conv2d(3, w, 3, padding=1, bias=False),
            nn.BatchNorm2d(w),
            nn.ReLU(),
            Block(w, w, 1),
            Block(w, 2 * w, 2),
            Block(2 * w, 4 * w, 2),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(4 * w, 3),
        )

    def optimizer(self, model):
        return torch.optim.SGD(model.parameters(), lr=self.lr, momentum=0.9, nesterov=True, weight_decay=1e-4)

    def scheduler(self, optimizer, total_steps):
        first = max(1, round(self.warm_up * total_steps))

        def rate(step):
            if step < first:
                return (step + 1) / first
            return 0.5 * (1 + math.cos(math.pi * (step - first) / max(1, total_steps - first)))

        return torch.optim.lr_scheduler.LambdaLR(optimizer, rate)

    def train_data(self):
        return Shapes(self.samples, seed=0, augment=True)

    def eval_data(self):
        return Shapes(128, seed=1, augment=False)

    def loss(self, model, batch):
        images, labels = batch
        return paceline.Loss.mean(
            F.cross_entropy(model(images), labels, reduction="none", label_smoothing=0.1)
        )

    def metrics(self, model, batch):
        images, labels = batch
        return {"accuracy": paceline.Mean((model(images).argmax(-1) == labels).sum(), len(labels))}
