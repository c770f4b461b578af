import sys

import torch
from torch.nn import functional as F
from work import BATCH, EPOCHS, Journal, digits, discriminator, generator

import paceline


def main(run: paceline.Run):
    journal = Journal(run.world.rank)
    train, _ = digits()
    maker, judge = generator(), discriminator()
    maker_optimizer = torch.optim.Adam(maker.parameters(), lr=1e-3)
    judge_optimizer = torch.optim.Adam(judge.parameters(), lr=1e-3)
    run.prepare({"maker": maker, "judge": judge}, {"maker": maker_optimizer, "judge": judge_optimizer})
    for step in run.steps(train, batch_size=BATCH, epochs=EPOCHS, turns=("judge", "maker")):
        samples = []
        for index, image, _ in step:
            real, fake = torch.ones(len(image), 1), torch.zeros(len(image), 1)
            made = maker(torch.randn(len(image), 16))
            if step.turn == "judge":
                answer, truth = judge(torch.cat([image.flatten(1), made.detach()])), torch.cat([real, fake])
            else:
                answer, truth = judge(made), real
            step.backward(F.binary_cross_entropy_with_logits(answer, truth, reduction="none"))
            samples += index.tolist()
        step.apply()
        if step.turn == "maker":
            journal.step((step.number + 1) // 2, samples)
    journal.end(maker, judge)


if __name__ == "__main__":
    paceline.launch(main, workers=int(sys.argv[1]), shards=2)
