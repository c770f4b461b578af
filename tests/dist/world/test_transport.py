"""A run says what its tensors really travelled by, not what was asked for."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import paceline
from paceline.training import trainer
from paceline.training.spec import TrainSpec

SPEC = TrainSpec(task="paceline.tasks.digits:Digits", name="digits", steps=1, batch_size=8)


def travelled(run: paceline.Run, ways: dict[str, dict[str, Any]]) -> dict[str, str]:
    found = {}
    for name, options in ways.items():
        world = replace(run.world, transports=set())
        own = paceline.Run(world, replace(run._engine.state.options, out=None, **options))
        found[name] = str(trainer.main(own, SPEC)["transport"])
    return found


def test_what_tensors_travel_by() -> None:
    ways = {
        "ddp": {},
        "sockets": {"transport": "gloo"},
        "numeric": {"exact": "numeric"},
        "fsdp": {"strategy": "fsdp"},
        "pp": {"strategy": "pp"},
        "local": {"strategy": "local-sgd"},
    }
    found = paceline.launch(travelled, ways, workers=2, shards=2, threads=1, device="cpu")
    assert found[0] == found[1]
    assert found[0] == {
        "ddp": "shared memory",
        "sockets": "gloo",
        "numeric": "gloo",
        "fsdp": "shared memory",
        "pp": "gloo",
        "local": "shared memory",
    }


def test_one_process_threads_servers_and_the_records(tmp_path: Path) -> None:
    options: dict[str, Any] = {"shards": 2, "threads": 1, "device": "cpu"}
    (alone,) = paceline.launch(trainer.main, SPEC, **options)
    (threads,) = paceline.launch(trainer.main, SPEC, strategy="dp", workers=2, **options)
    served = paceline.launch(trainer.main, SPEC, strategy="ps", workers=2, out=tmp_path / "ps", **options)[0]
    assert [one["transport"] for one in (alone, threads, served)] == ["none", "threads", "calls"]
    events = [json.loads(line) for line in (tmp_path / "ps" / "events.jsonl").read_text().splitlines()]
    assert [one["transport"] for one in events if one["kind"] == "run_started"] == ["calls"]
    receipt = json.loads((tmp_path / "ps" / "receipt.json").read_text())
    assert (receipt["transport"], receipt["transport_asked"]) == ("calls", "auto")
