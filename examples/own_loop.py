import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

features = torch.randn(1000, 16, generator=torch.Generator().manual_seed(0))
data = TensorDataset(features, features.sum(1, keepdim=True))


def error(model, batch):
    x, y = batch
    return {"error": paceline.Mean(F.mse_loss(model(x), y, reduction="sum"), len(y))}


def main(run: paceline.Run, lr: float):
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    model, optimizer = run.prepare(model, optimizer)
    for step in run.steps(data, batch_size=128, epochs=10):  # one optimizer step each
        for x, y in step:  # this worker's share of the global batch
            losses = F.mse_loss(model(x), y, reduction="none")
            step.backward(losses.sum(), len(losses))  # a sum and its weight, never a mean
        step.apply(max_grad_norm=1.0)  # add up over all workers, divide once, clip, update
    return run.evaluate(data, error)["error"]


results = paceline.launch(main, 0.1, workers=2, shards=8)  # the same bits for 1 to 8 workers
print("error on each worker:", *(f"{result:.4f}" for result in results))
