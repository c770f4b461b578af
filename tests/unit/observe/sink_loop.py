"""A loop that reports, for the tests of sinks."""

import torch
from torch import nn


def train(run):
    model, _ = run.prepare(net := nn.Linear(2, 1), torch.optim.SGD(net.parameters(), lr=0.1))
    for step in run.steps(torch.ones(8, 2), batch_size=4, epochs=1):
        for x in step:
            step.backward(model(x).square().flatten())
        step.apply()
        run.log({"seen": step.number})
