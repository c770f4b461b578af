"""Sources of parts: the same samples for any number of workers, from any step on, each worker reading only its own."""

from __future__ import annotations

import gzip
import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from paceline.data import Parts, TarFiles
from paceline.errors import InputError
from tests.unit.data.sources import combined, epoch_of, loader_of

LENGTHS = [7, 0, 13, 1, 20, 9, 11, 5, 8, 26]


class Opened:
    """Parts whose samples hold their number and what was drawn for them; notes what was opened."""

    def __init__(self) -> None:
        self.opened: list[int] = []

    def __call__(self, part: int) -> Iterator[Any]:
        self.opened.append(part)
        for number in range(LENGTHS[part]):
            yield torch.tensor([100 * part + number, torch.rand(()).item()])


class Shard(list[Any]):
    """Is told the epoch itself, for nobody hands it on."""

    def set_epoch(self, epoch: int) -> None:
        for item in self:
            item[1] = epoch


class Shards:
    """As Hugging Face's `IterableDataset`."""

    num_shards = len(LENGTHS)

    def __init__(self) -> None:
        self.epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def shard(self, num_shards: int, index: int) -> Any:
        return Shard(torch.tensor([100 * index + number, -1]) for number in range(LENGTHS[index]))


def parts(**options: Any) -> Parts:
    return Parts(range(len(LENGTHS)), Opened(), **options)


KINDS: dict[str, Any] = {
    "once": lambda: parts(lengths=LENGTHS),
    "in order": lambda: parts(lengths=LENGTHS, shuffle=False),
    "counted": lambda: parts(lengths=lambda part: LENGTHS[part], buffer=6),
    "again": lambda: parts(samples_per_epoch=150),
    "again, mixed": lambda: parts(samples_per_epoch=75, buffer=4),
    "shards": lambda: Parts.of(Shards(), lengths=LENGTHS),
}


def numbers(steps: list[Any]) -> list[int]:
    return [
        int(row[0]) for _, _, shards in steps for _, _, batches in shards for rows in batches for row in rows
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_parts_are_read_alike_by_any_number_of_workers_from_any_step(kind: str) -> None:
    make, options = KINDS[kind], {"micro_batch": 2, "epoch": 1}
    alone = combined(make(), workers=1, **options)
    for workers in (2, 3):
        assert combined(make(), workers=workers, **options) == alone
    for start in (1, 3, 9):
        assert combined(make(), workers=2, start_step=start, **options) == alone[start:]
    assert combined(make(), workers=2, num_workers=3, **options) == alone
    assert [size for _, size, _ in alone[:-1]] == [8] * (len(alone) - 1)


def test_every_loading_process_has_a_number_of_its_own(tmp_path: Path) -> None:
    def note(number: int) -> None:
        (tmp_path / f"{number}").touch(exist_ok=False)

    epoch_of(parts(lengths=LENGTHS), num_workers=3, worker_init_fn=note)
    assert sorted(one.name for one in tmp_path.iterdir()) == ["0", "1", "2"]


@pytest.mark.parametrize("batch_size", [8, 9, 100, 7])
def test_every_sample_is_used_once(batch_size: int) -> None:
    wanted = sorted(100 * part + number for part, length in enumerate(LENGTHS) for number in range(length))
    orders = []
    for make in (KINDS["once"], KINDS["counted"], KINDS["in order"]):
        found = numbers(combined(make(), workers=3, batch_size=batch_size))
        assert sorted(found) == wanted
        orders.append(found)
    assert len(set(map(tuple, orders))) == 3


def test_a_worker_opens_the_parts_of_its_shards_alone() -> None:
    opened = []
    for rank in range(4):
        source = parts(lengths=LENGTHS)
        epoch_of(source, rank=rank, workers=4)
        opened.append(source.open.opened)  # type: ignore[attr-defined]
    assert sum(map(len, opened)) <= len(LENGTHS) + 3
    source = parts(lengths=LENGTHS)
    epoch_of(source, start_step=11)
    assert len(source.open.opened) < len(LENGTHS)  # type: ignore[attr-defined]


def test_an_epoch_of_unknown_parts_is_as_long_as_was_said() -> None:
    found = numbers(combined(KINDS["again"](), workers=1))
    assert len(found) == 150
    assert len(set(found)) < 100 < len(found)
    assert numbers(combined(KINDS["again"](), workers=1, epoch=1)) != found


def test_the_epoch_is_told() -> None:
    (first, *_) = combined(KINDS["shards"](), workers=1, epoch=3)
    assert {row[1] for _, _, batches in first[2] for rows in batches for row in rows} == {3}


def test_other_parts_are_compared() -> None:
    def said(source: Parts) -> Any:
        loader = loader_of(source)
        step = next(iter(loader.epoch(0, 2, contents=True, beginning=True)))
        loader.close()
        return step.contents

    def named(*names: str) -> Parts:
        return Parts(names, lambda name: [0.0] * 50, lengths=[50] * len(names))

    assert said(named("/here/a", "/here/b")) == said(named("/there/a", "/there/b"))
    assert said(named("b", "a")) != said(named("a", "b"))
    assert said(parts(lengths=LENGTHS)) != said(parts(lengths=[*LENGTHS[:-2], 9, 25]))


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (parts, "need either lengths"),
        (lambda: parts(lengths=LENGTHS, samples_per_epoch=3), "need either lengths"),
        (lambda: Parts([], Opened(), samples_per_epoch=3), "empty"),
        (lambda: parts(lengths=[3]), "1 numbers, together 3, for 10 parts"),
        (lambda: Parts(range(3), Opened(), samples_per_epoch=9), "3 parts of unknown lengths .* 4 shards"),
        (lambda: Parts([1] * 4, Opened(), samples_per_epoch=9), "shard 0 gave no sample"),
        (lambda: parts(lengths=[*LENGTHS[:-1], 27]), "part 9 has fewer samples than the 27"),
        (lambda: parts(lengths=[*LENGTHS[:-1], 25]), "part 9 has more samples than the 25"),
        (lambda: parts(lengths=[*LENGTHS[:-1], 25], shuffle=False), "part 9 has more samples than the 25"),
        (lambda: Parts.of(Opened()), "an? Opened has no parts"),
    ],
)
def test_parts_that_cannot_be_dealt_out_are_refused(make: Any, words: str) -> None:
    with pytest.raises(InputError, match=words):
        epoch_of(make())


def written(path: Path, members: dict[str, bytes]) -> Path:
    with tarfile.open(path, "w:gz" if path.suffix == ".gz" else "w") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
    return path


def array(values: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, values, **options)
    return file.getvalue()


def test_tar_files_are_read_by_samples(tmp_path: Path) -> None:
    from safetensors.torch import save

    def sample(number: int) -> dict[str, bytes]:
        name = f"set/{number:03}"
        return {
            f"{name}.cls": str(number).encode(),
            f"{name}.x.npy": array(np.full(2, number)),
            f"{name}.json": json.dumps({"n": number}).encode(),
            f"{name}.txt": "ä".encode(),
            f"{name}.bin": bytes([number]),
            f"{name}.safetensors": save({"t": torch.tensor([number])}),
        }

    paths = [
        written(tmp_path / name, {key: one for n in some for key, one in sample(n).items()})
        for name, some in (("a.tar", range(5)), ("b.tar.gz", range(5, 19)))
    ]
    (first, *_) = TarFiles(paths).open(str(paths[0]))
    assert first.pop("x.npy").tolist() == [0, 0]
    assert first.pop("safetensors")["t"].tolist() == [0]
    assert first == {"__key__": "set/000", "cls": 0, "json": {"n": 0}, "txt": "ä", "bin": b"\0"}

    def number_of(sample: dict[str, Any]) -> Any:
        return torch.tensor([sample["cls"]])

    alone = combined(TarFiles(paths, decode=number_of, buffer=3), workers=1)
    assert sorted(numbers(alone)) == list(range(19))
    assert combined(TarFiles(paths, decode=number_of, buffer=3), workers=3) == alone


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.pth", b"", "is a pickle, which runs whatever code"),
        ("a.b.pkl", b"", "is a pickle"),
        ("a.npy", array(np.array([{}], dtype=object), allow_pickle=True), "is no npy"),
        ("a.cls", b"x", "is no cls"),
        ("a.npy", b"", "is no npy"),
        ("a.safetensors", b"x", "is no safetensors"),
        ("a.__key__", b"x", "is the name of a sample"),
    ],
)
def test_members_that_cannot_be_trusted_are_refused(
    tmp_path: Path, name: str, content: bytes, words: str
) -> None:
    path = written(tmp_path / "a.tar", {name: content})
    with pytest.raises(InputError, match=words):
        epoch_of(TarFiles([path]), shards=1)


def test_a_sample_with_two_members_of_one_ending_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "a.tar", {"a.txt": b"1", "a.JSON": b"1", "a.json": b"2"})
    with pytest.raises(InputError, match=r"a\.json in .*: its sample has a member \.json already"):
        epoch_of(TarFiles([path]), shards=1)


@pytest.mark.parametrize("ending", ["", ".gz"])
@pytest.mark.parametrize("damage", ["cut", "header"])
def test_a_tar_file_that_is_not_whole_is_refused(tmp_path: Path, damage: str, ending: str) -> None:
    """tarfile takes a damaged header for the end: an epoch would be of the samples before it alone."""
    path = written(tmp_path / "a.tar", {f"{number}.txt": b"x" * 500 for number in range(3)})
    content = path.read_bytes()
    cut = content[:1024] if damage == "cut" else content[:1024] + b"?" * 512 + content[1536:]
    path = tmp_path / f"b.tar{ending}"
    path.write_bytes(gzip.compress(cut) if ending else cut)
    with pytest.raises(InputError, match=r"b\.tar.* is not whole"):
        epoch_of(TarFiles([path]), shards=1)
    with pytest.raises(InputError, match=r"b\.tar.* is not whole"):
        epoch_of(TarFiles([path], samples_per_epoch=3), shards=1)


def test_the_parts_of_hugging_face_streams() -> None:
    datasets = pytest.importorskip("datasets")

    def rows(files: list[int]) -> Iterator[Any]:
        for file in files:
            for number in range(LENGTHS[file]):
                yield {"x": 100 * file + number}

    def source() -> Parts:
        made = datasets.IterableDataset.from_generator(rows, gen_kwargs={"files": list(range(len(LENGTHS)))})
        return Parts.of(made, samples_per_epoch=90)

    def collate(items: list[Any]) -> Any:
        return torch.tensor([[item["x"]] for item in items])

    alone = combined(source(), workers=1, collate=collate)
    assert combined(source(), workers=3, collate=collate) == alone
