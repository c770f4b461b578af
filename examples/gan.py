"""A GAN on handwritten digits: the discriminator steps, then the generator, on the same images."""

import sys

import torch
from torch import nn
from torch.nn import functional as F

import paceline
from paceline.tasks.digits import Digits

NOISE = 16


def generator() -> nn.Module:
    return nn.Sequential(
        nn.Linear(NOISE, 64),
        nn.BatchNorm1d(64),
        nn.ReLU(),
        nn.Linear(64, 64),
        nn.Sigmoid(),
        nn.Unflatten(1, (1, 8, 8)),
    )


def discriminator() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.LeakyReLU(0.2),
        nn.Conv2d(16, 16, 3, stride=2, padding=1),
        nn.LeakyReLU(0.2),
        nn.Flatten(),
        nn.Dropout(0.2),
        nn.Linear(256, 1),
        nn.Flatten(0),
    )


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.5, 0.999))


def main(run: paceline.Run, epochs: int):
    models = {"generator": generator, "discriminator": discriminator}
    models, _ = run.prepare(models, {"generator": adam, "discriminator": adam})
    paint, judge = models["generator"], models["discriminator"]
    means = run.register("means", {"generator": 0.0, "discriminator": 0.0})
    turns = ("discriminator", "generator")
    for step in run.steps(Digits().train_data(), batch_size=64, epochs=epochs, turns=turns):
        for real, _ in step:
            fake = paint(torch.randn(len(real), NOISE))
            if step.turn == "discriminator":
                step.backward(F.softplus(-judge(real)) + F.softplus(judge(fake.detach())))
            else:
                step.backward(F.softplus(-judge(fake)))
        means[step.turn] += 0.1 * (step.apply().loss - means[step.turn])  # only its own optimizer steps
    return {**means, "weights": run.weights_sha256()}


workers = int(sys.argv[1]) if len(sys.argv) > 1 else 2
found = paceline.launch(main, 3, workers=workers, shards=4, threads=1)[0]
print(
    f"generator {found['generator']:.4f}, discriminator {found['discriminator']:.4f}, weights {found['weights'][:16]}"
)
