import os
import sys
from pathlib import Path

import torch
from torch.nn import functional as F
from work import BATCH, EPOCHS, SAVE_EVERY, Journal, classifier, digits

import paceline


def main(run: paceline.Run):
    journal = Journal(run.world.rank)
    train, _ = digits()
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, 3e-3, total_steps=EPOCHS * -(-len(train) // BATCH)
    )
    model, optimizer = run.prepare(model, optimizer, scheduler=schedule)
    for step in run.steps(train, batch_size=BATCH, epochs=EPOCHS):
        samples = []
        for index, image, label in step:
            step.backward(F.cross_entropy(model(image), label, reduction="none"))
            samples += index.tolist()
        if not step.apply().again:
            journal.step(step.number + 1, samples)
    journal.end(model)


if __name__ == "__main__":
    out = Path(os.environ["COMPARE_OUT"], "run")
    saved = any(out.glob("checkpoints/step-*"))
    paceline.launch(main, workers=int(sys.argv[1]), shards=2, out=out, save_every=SAVE_EVERY, resume=saved)
