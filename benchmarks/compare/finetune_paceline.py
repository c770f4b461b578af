import sys

import torch
from work import PADDING, Journal, Reader, sequences

import paceline


def main(run: paceline.Run):
    journal = Journal(run.world.rank)
    data = sequences()
    model = Reader()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model, optimizer = run.prepare(model, optimizer)
    for step in run.steps(data, batch_size=len(data), epochs=20):
        samples = []
        for index, tokens, labels in step:
            step.backward(paceline.Loss.tokens(model(tokens), labels, ignore_index=PADDING))
            samples += index.tolist()
        step.apply()
        journal.step(step.number + 1, samples)
    journal.end(model)


if __name__ == "__main__":
    paceline.launch(main, workers=int(sys.argv[1]), shards=2, micro_batch=4)
