"""The server's side of hybrid's calls."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from paceline.strategies.hybrid.embedding_service import Commit, EmbeddingService
from paceline.world.interruption import Interruption


def test_a_trainer_told_late_still_hears_the_norms_of_its_step() -> None:
    """Another trainer may have had the step applied before this one's call has woken up."""
    service = EmbeddingService([], 1, Interruption())
    service.advance()
    norms = [torch.ones(3)]
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(service.push, 1, 0, [])
        try:
            service.collect()
            with service._changed:  # the call cannot wake up before the server is in the next turn
                service.apply(1, Commit(1.0, torch.zeros(2), None, []))
                service.confirm(norms)
                service.advance()
            assert call.result(timeout=10) is norms
        finally:
            service.close()


def test_a_push_is_not_answered_with_the_norms_of_an_earlier_step() -> None:
    service = EmbeddingService([], 1, Interruption())
    answers = []
    for turn, norms in ((1, [torch.ones(1)]), (2, [torch.zeros(1)])):
        service.advance()
        called = threading.Thread(target=lambda turn=turn: answers.append(service.push(turn, 0, [])))
        called.start()
        service.collect()
        time.sleep(0.05)
        assert len(answers) == turn - 1
        service.apply(turn, Commit(1.0, torch.zeros(2), None, []))
        service.confirm(norms)
        called.join(10)
        assert answers[-1] is norms
