"""Shuffled and packed streams, and text files: read alike from any step on, also with a state."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline.data import TextFiles, packed, shuffled
from paceline.errors import InputError
from tests.unit.data.sources import combined, loader_of
from tests.unit.data.test_stream_states import Files, said, steps_of

WORDS = [[10 * one + place for place in range(one % 7)] for one in range(60)]


class Documents:
    """Lists of tokens, without a state."""

    def __iter__(self) -> Any:
        return iter(WORDS)


def texts(folder: Path) -> list[Path]:
    paths = [folder / f"{number}.txt" for number in range(6)]
    for number, path in enumerate(paths):
        path.write_text("".join(f"line {number} {line}\n" for line in range(9)))
    return paths


def bytes_of(folder: Path, **options: Any) -> Any:
    return TextFiles(texts(folder), **options)


STREAMS: dict[str, Any] = {
    "shuffled": lambda folder: shuffled(Files(), 12),
    "shuffled, no state": lambda folder: shuffled(range(90), 12),
    "packed": lambda folder: packed(bytes_of(folder), 7, eos=0),
    "packed lines": lambda folder: shuffled(packed(bytes_of(folder, lines=True), 7), 5),
    "packed, no state": lambda folder: packed(Documents(), 3, eos=0),
}


@pytest.mark.parametrize("name", STREAMS)
def test_it_is_read_alike_from_any_step_on_with_a_state_or_without(name: str, tmp_path: Path) -> None:
    make = STREAMS[name]
    alone = steps_of(loader_of(make(tmp_path)), 1)
    assert [size for _, size, _ in said(alone)] == [
        size for _, size, _ in combined(make(tmp_path), workers=3, epoch=1)
    ]
    assert len(alone) > 5
    has_states = (
        "no state" not in name and name != "shuffled"
    )  # whose items draw, and are others in another step
    for start in (2, 5):
        assert (alone[start - 1].state is not None) is has_states
        for state in {id(one): one for one in (None, alone[start - 1].state)}.values():
            assert said(steps_of(loader_of(make(tmp_path)), 1, start, state)) == said(alone[start:])


@pytest.mark.parametrize("kind", ["packed, then shuffled", "shuffled, then packed"])
def test_states_are_trusted_in_every_epoch_also_within_the_first_block(kind: str, tmp_path: Path) -> None:
    def make() -> Any:
        files = bytes_of(tmp_path, lines=True)
        return shuffled(packed(files, 7), 50) if kind.startswith("packed") else packed(shuffled(files, 50), 7)

    loader = loader_of(make())
    for epoch in (0, 1):
        steps = list(loader.epoch(epoch, states=True))
        assert [step.note for step in steps] == [None] * len(steps)
        assert said(steps_of(loader_of(make()), epoch, 3, steps[2].state)) == said(steps[3:])


def test_a_state_within_a_long_document_is_small(tmp_path: Path) -> None:
    (tmp_path / "long.txt").write_text("word " * 40_000)
    stream = packed(TextFiles([tmp_path / "long.txt"]), 100)
    sizes = {len(pickle.dumps(stream.state_dict())) for _ in stream}
    assert max(sizes) < 500
    again = packed(TextFiles([tmp_path / "long.txt"]), 100)
    again.load_state_dict({"inside": None, "taken": 150_000})
    assert torch.equal(next(iter(again)), list(stream)[1500])


def test_a_shuffled_stream_holds_every_item_once_in_another_order_each_epoch() -> None:
    orders = [
        [
            int(item)
            for step in steps_of(loader_of(shuffled(range(90), 20)), epoch)
            for shard in step.shards
            for batch in shard.batches
            for item in batch
        ]
        for epoch in (0, 1, 1)
    ]
    assert orders[0] != orders[1] == orders[2]
    assert all(sorted(order) == list(range(90)) for order in orders)
    assert sorted(orders[0][:20]) == list(range(20))


def test_documents_are_cut_one_after_the_other() -> None:
    row = [token for words in WORDS for token in [*words, 7]]
    found = torch.cat(list(packed(Documents(), 5, eos=7))).tolist()
    assert found == row[: len(row) - len(row) % 5]
    assert not hasattr(packed(Documents(), 5), "state_dict")
    with pytest.raises(InputError, match="only once"):
        packed(iter(WORDS), 5)


def test_text_files_give_files_or_lines(tmp_path: Path) -> None:
    paths = texts(tmp_path)
    whole = list(TextFiles(paths))
    assert [bytes(one).decode() for one in whole] == [path.read_text() for path in paths]
    lines = list(TextFiles(paths, tokenizer=str.split, lines=True))
    assert lines[10] == ["line", "1", "1"]
    with pytest.raises(InputError, match="no text files"):
        TextFiles([])
