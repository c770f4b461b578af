"""What is sent is what it was when it was sent: a loop that writes to its tensors afterwards changes nothing on its way."""

import torch

import paceline
from paceline import remote

VALUES = 2 << 20
TIMES = 12


@remote.service
class Looker:
    """Looks at what it gets."""

    def first_and_last(self, given: torch.Tensor) -> tuple[float, float, float]:
        return given[0].item(), given[-1].item(), given.sum(dtype=torch.float64).item()


def write_behind_calls(session):
    return [one for worker in ("server:0", session.name) for one in written_behind(worker)]


def written_behind(worker):
    looker = remote.create(worker, Looker)
    mine = torch.zeros(VALUES)
    wanted, found = [], []
    for number in range(1, TIMES + 1):
        mine.fill_(number)
        found.append(looker.first_and_last.future(mine))
        wanted.append((float(number), float(number), float(number) * VALUES))
        mine.fill_(-1.0)
    return [one.wait() == other for one, other in zip(found, wanted, strict=True)]


def test_tensors_may_be_written_to_as_soon_as_a_call_is_on_its_way():
    results = paceline.launch_roles({"trainers": remote.Role(write_behind_calls, 1), "servers": 1}, threads=1)
    assert results["trainers"][0] == [True] * 2 * TIMES
