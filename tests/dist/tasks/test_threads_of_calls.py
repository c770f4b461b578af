"""A call computes with as many threads as its worker was given, whichever thread answers it."""

import ctypes
import re
from pathlib import Path

import paceline
from paceline import remote
from paceline.remote import Role


def threads_here():
    """Ask OpenMP itself: torch's own question would put the number right first."""
    maps = Path("/proc/self/maps").read_text()
    library = re.search(r"\S+lib(?:g|i)omp\S*\.so\S*", maps)
    return ctypes.CDLL(library[0]).omp_get_max_threads()


@remote.service
class Threads:
    def single(self):
        return threads_here()

    @remote.batched(max_size=4, max_wait_ms=1)
    def batched(self, items):
        return [threads_here()] * len(items)


def ask(session):
    served = remote.create("server:0", Threads)
    answers = remote.wait_all([served.single.future() for _ in range(64)])
    return answers, served.batched(None)


def test_every_thread_keeps_to_the_workers_number():
    roles = {"caller": Role(ask), "servers": 1}
    ((single, batched),) = paceline.launch_roles(roles, threads=1)["caller"]
    assert set(single) == {1}
    assert batched == 1
