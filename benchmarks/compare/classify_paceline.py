import sys

import torch
from torch.nn import functional as F
from work import BATCH, EPOCHS, Journal, classifier, digits

import paceline


def right(model, batch):
    _, image, label = batch
    return {"accuracy": paceline.Mean((model(image).argmax(-1) == label).sum(), len(label))}


def main(run: paceline.Run):
    journal = Journal(run.world.rank)
    train, held_out = digits()
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=EPOCHS * -(-len(train) // BATCH)
    )
    model, optimizer = run.prepare(model, optimizer, scheduler=schedule)
    for step in run.steps(train, batch_size=BATCH, epochs=EPOCHS, max_grad_norm=1.0):
        samples = []
        for index, image, label in step:
            step.backward(F.cross_entropy(model(image), label, reduction="none"))
            samples += index.tolist()
        step.apply()
        journal.step(step.number + 1, samples)
    journal.end(model, **run.evaluate(held_out, right))


if __name__ == "__main__":
    paceline.launch(main, workers=int(sys.argv[1]), shards=2)
