"""What a resumed run takes over: nothing is refused that nobody asked for."""

import pytest

from paceline.errors import InputError
from paceline.launch.resumed import lay_out, usable
from paceline.training.options import RunOptions

NOBODY = {"strategy": None, "workers": None, "servers": None, "shards": None, "nodes": "1"}


@pytest.mark.parametrize(
    ("kept", "said", "found"),
    [
        ({}, {}, ("ddp", 1, None)),
        ({}, {"strategy": "fsdp,tp=2"}, ("fsdp,tp=2", 2, None)),
        ({"strategy": "ddp", "workers": 2, "shards": 2}, {}, ("ddp", 2, None)),
        ({"strategy": "ddp", "workers": 2, "shards": 2}, {"strategy": "single"}, ("single", 1, None)),
        ({"strategy": "ddp", "workers": 2, "shards": 2}, {"strategy": "dp"}, ("dp", 2, None)),
        ({"strategy": "ddp", "workers": 3, "shards": 4}, {"strategy": "fsdp,tp=2"}, ("fsdp,tp=2", 2, None)),
        ({"strategy": "ddp", "workers": 1, "shards": 4}, {"strategy": "ddp,pp=2"}, ("ddp,pp=2", 2, None)),
        ({"strategy": "ddp=2,tp=2", "workers": 4, "shards": 2}, {"strategy": "ddp"}, ("ddp", 2, None)),
        ({"strategy": "ddp=2,fsdp=2", "workers": 4, "shards": 4}, {"workers": 3}, ("fsdp=3", 3, None)),
        ({"strategy": "pp", "workers": 2, "shards": 4}, {"workers": 3}, ("pp", 3, None)),
        ({"strategy": "single", "workers": 1, "shards": 4}, {"workers": 3}, ("ddp", 3, None)),
        ({"strategy": "ddp", "workers": 4, "shards": 4}, {"nodes": "2"}, ("ddp", 2, None)),
        (
            {"strategy": "ddp", "workers": 2, "shards": 4},
            {"strategy": "ddp=2,fsdp=2"},
            ("ddp=2,fsdp=2", 4, None),
        ),
        ({"strategy": "ddp"}, {"strategy": "ddp=2,fsdp=2"}, ("ddp=2,fsdp=2", 4, None)),
        ({"strategy": "ps", "workers": 2, "shards": 2, "servers": 2}, {}, ("ps", 2, 2)),
        (
            {"strategy": "ps", "workers": 2, "shards": 2, "servers": 2},
            {"strategy": "fsdp"},
            ("fsdp", 2, None),
        ),
        (
            {"strategy": "ps", "workers": 2, "shards": 2, "servers": 2},
            {"strategy": "single"},
            ("single", 1, None),
        ),
    ],
)
def test_numbers_fit_the_strategy_where_nobody_asks_for_others(kept, said, found):
    layout = lay_out(kept, **{**NOBODY, **said})
    assert (layout.strategy, layout.workers, layout.servers) == found
    RunOptions(
        strategy=layout.strategy,
        workers=layout.workers,
        servers=layout.servers,
        shards=kept.get("shards"),
        nodes=said.get("nodes", "1"),
    )
    changed = {"strategy": layout.strategy, "workers": layout.workers, "servers": layout.servers}
    assert bool(layout.notes) == any(
        kept.get(name, changed[name]) != changed[name] and said.get(name) is None for name in changed
    )


@pytest.mark.parametrize(
    ("kept", "joined", "found"),
    [
        ({}, 3, ("ddp", 3)),
        ({"strategy": "ddp=2,fsdp=2", "workers": 4, "shards": 4}, 2, ("ddp=1,fsdp=2", 2)),
        ({"strategy": "single", "workers": 1, "shards": 4}, 2, ("ddp", 2)),
        ({"strategy": "dp", "workers": 4, "shards": 4}, 2, ("ddp", 2)),
        ({"strategy": "dp", "workers": 4, "shards": 4}, 1, ("dp", 4)),
        ({"strategy": "ps", "workers": 2, "servers": 2, "shards": 4}, 5, ("ps", 3)),
    ],
)
def test_a_world_that_is_there_counts_as_asked_for(kept, joined, found):
    layout = lay_out(kept, **NOBODY, joined=joined)
    assert (layout.strategy, layout.workers) == found
    assert bool(layout.notes) == (kept.get("strategy", layout.strategy) != layout.strategy)


@pytest.mark.parametrize(
    "said",
    [
        {"strategy": "single", "workers": 2},
        {"strategy": "fsdp,tp=2", "workers": 3},
        {"workers": 9},
        {"strategy": "fsdp", "servers": 1},
    ],
)
def test_what_was_asked_for_is_refused_and_not_changed(said):
    kept = {"strategy": "ddp", "workers": 2, "shards": 2}
    layout = lay_out(kept, **{**NOBODY, **said})
    assert layout.workers == said.get("workers", layout.workers)
    assert layout.strategy == said.get("strategy", layout.strategy)
    with pytest.raises(InputError):
        _ = RunOptions(
            strategy=layout.strategy, workers=layout.workers, servers=layout.servers, shards=2
        ).processes


def test_tuning_of_another_strategy_is_left_out_with_a_note():
    before = {
        "compress": "bf16",
        "bucket_mb": None,
        "activation_checkpointing": "blocks",
        "shard_optimizer": False,
    }
    assert usable("ddp", before) == (before, ())
    kept, notes = usable("fsdp", before)
    assert kept == {"activation_checkpointing": "blocks"}
    assert notes == ("the run had --compress bf16, which --strategy fsdp has no use for: it is left out.",)
    _, notes = usable("fsdp", {"shard_optimizer": True})
    assert notes == ("the run had --shard-optimizer, which --strategy fsdp has no use for: it is left out.",)
