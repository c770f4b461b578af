import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline
from paceline.tasks.digits import read_digits


class Digits(paceline.Task):
    batch_size = 64  # the global batch: it does not change with the number of workers
    shards = 8  # logical shards of it: what the bits depend on, like the seed
    epochs = 5

    def __init__(self, lr: float = 3e-3):
        self.lr = lr

    def model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def optimizer(self, model):
        return torch.optim.AdamW(model.parameters(), lr=self.lr)

    def train_data(self):
        images, labels = read_digits()  # 1,797 images of 8 x 8 from scikit-learn's files
        return TensorDataset(images[:1437] / 16, labels[:1437])

    def eval_data(self):
        images, labels = read_digits()
        return TensorDataset(images[1437:] / 16, labels[1437:])

    def loss(self, model, batch):
        images, labels = batch
        return paceline.Loss.mean(F.cross_entropy(model(images), labels, reduction="none"))

    def metrics(self, model, batch):
        images, labels = batch
        right = (model(images).argmax(-1) == labels).sum()
        return {"accuracy": paceline.Mean(right, len(labels))}
