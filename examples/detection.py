"""Where is it, and is it there at all? Two losses, each divided by what it counts.

Whether a cell of the image holds an object is asked of every cell; where exactly, only of those that do. So the second loss has a
weight of its own: the cells with an object in the whole global batch, wherever they are.

python examples/detection.py
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import paceline

CELLS, SIZE = 4, 4
"""An image of CELLS x CELLS cells, each of SIZE x SIZE pixels."""


def scenes(count, seed):
    """Draw images with some bright points: for each cell whether it has one, and where in it."""
    generator = torch.Generator().manual_seed(seed)
    there = torch.rand(count, CELLS, CELLS, generator=generator) < 0.2
    place = torch.randint(SIZE, (count, CELLS, CELLS, 2), generator=generator)
    images = 0.1 * torch.randn(count, 1, CELLS * SIZE, CELLS * SIZE, generator=generator)
    for image, row, column in there.nonzero().tolist():
        y, x = place[image, row, column].tolist()
        images[image, 0, row * SIZE + y, column * SIZE + x] += 1
    return TensorDataset(images, there.float(), (place + 0.5) / SIZE)


def main(run, epochs):
    net = nn.Sequential(
        nn.Conv2d(1, 16, SIZE, stride=SIZE), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.ReLU(), nn.Conv2d(16, 3, 1)
    )
    model, _ = run.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
    result = None
    for step in run.steps(scenes(256, seed=0), batch_size=32, epochs=epochs):
        right = cells = 0
        for images, there, place in step:
            out = model(images)
            objects = F.binary_cross_entropy_with_logits(out[:, 0], there, reduction="none")
            boxes = F.smooth_l1_loss(out[:, 1:].movedim(1, -1), place, reduction="none").sum(-1)
            near = paceline.Loss((boxes * there).sum(), there.sum())
            step.backward(paceline.Loss(objects.sum(), objects.numel(), {"boxes": near}))
            right, cells = right + ((out[:, 0] > 0) == (there > 0)).sum(), cells + there.numel()
        result = step.apply()
        run.log({"right": paceline.Mean(right, cells)})
    return result.loss, result.auxiliary["boxes"], run.weights_sha256()


if __name__ == "__main__":
    one = paceline.launch(main, 10, workers=1, shards=4)
    two = paceline.launch(main, 10, workers=2, shards=4)
    print(f"loss {two[0][0]:.3f}, of which {two[0][1]:.3f} for the boxes")
    print("one worker and two agree to the bit:", one[0] == two[0] == two[1])
