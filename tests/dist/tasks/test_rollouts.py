"""Work dealt to the workers of a role: every piece is done, whoever is lost, until nobody is left."""

import os
import signal

import paceline
from paceline import remote
from paceline.errors import WorkerGoneError
from paceline.remote import Role
from paceline.remote.rollouts import Rollouts

DOOMED = "observer:1"


@remote.service
class Squares:
    """Plays a number by squaring it; one worker is lost with number 5 in hand, all with 99."""

    def play(self, numbers: list[int]) -> list[int]:
        """Square them."""
        if 99 in numbers or (5 in numbers and remote.current().name == DOOMED):
            os.kill(os.getpid(), signal.SIGKILL)
        return [number**2 for number in numbers]


def deal(session):
    squares = Rollouts("observers", Squares)
    first = squares.gather(range(3))
    second = squares.gather([7, 5, 6, 4])
    third = squares.gather(range(2))
    lost = sorted(session.lost)
    try:
        squares.gather([99])
    except WorkerGoneError as error:
        return first, second, third, lost, str(error)
    return None


def test_a_lost_workers_pieces_are_done_by_the_others():
    roles = {"agent": Role(deal), "observers": Role(workers=2, required=False)}
    (found,) = paceline.launch_roles(roles)["agent"]
    first, second, third, lost, problem = found
    assert first == [0, 1, 4]
    assert second == [49, 25, 36, 16]
    assert third == [0, 1]
    assert lost == [DOOMED]
    assert problem.startswith("all workers of the role observers are gone")
