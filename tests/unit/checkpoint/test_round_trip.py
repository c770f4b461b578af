"""What is saved comes back to the bit: every type, every layout, tied weights."""

from __future__ import annotations

import enum
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from paceline.checkpoint import load
from paceline.errors import CheckpointError
from paceline.state.optimizer_state import optimizer_state
from tests.checkpoints import Checkpoints
from tests.unit.checkpoint.states import EXTRA_STATE, MANIFEST, PART, assert_same, refuse, run_state

DTYPES = [
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.complex64,
    torch.int8, torch.int16, torch.int32, torch.int64, torch.uint8, torch.uint16, torch.bool,
]  # fmt: skip


def test_the_whole_state_comes_back(tmp_path: Path) -> None:
    state = run_state(12)
    path = Checkpoints(tmp_path / "checkpoints").save(12, state)
    loaded = Checkpoints(tmp_path / "checkpoints").newest(refuse)
    assert loaded is not None
    assert path == loaded.path == tmp_path / "checkpoints" / "step-12"
    assert {file.name for file in path.iterdir()} == {MANIFEST, PART, EXTRA_STATE}
    assert (loaded.step, loaded.position, loaded.meta) == (12, state["position"], state["meta"])
    assert_same(loaded.state, state)
    assert isinstance(loaded.state["optimizer"]["groups"][0]["betas"], tuple)


@settings(max_examples=40, deadline=None)
@given(
    dtype=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 4), max_size=3),
    transpose=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_any_tensor_comes_back(dtype: torch.dtype, shape: list[int], transpose: bool, seed: int) -> None:
    values = torch.randint(0, 100, shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    tensor = values.transpose(0, -1) if transpose and shape else values
    state = run_state(1) | {
        "model": {"x": tensor},
        "optimizer": {"state": {"x": {"y": tensor}}, "groups": []},
    }
    with tempfile.TemporaryDirectory() as folder:
        loaded = load(Checkpoints(Path(folder)).save(1, state))
    assert_same(loaded.state, state)


def test_nan_and_negative_zero_keep_their_bits(tmp_path: Path) -> None:
    odd = torch.tensor([float("nan"), -0.0, float("inf"), 1e-45])
    loaded = load(Checkpoints(tmp_path).save(1, run_state(1) | {"model": {"x": odd}}))
    assert torch.equal(loaded.state["model"]["x"].view(torch.int32), odd.view(torch.int32))


def test_tied_weights_come_back_under_every_name_and_are_stored_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(1000, 16)
            self.head = nn.Linear(16, 1000, bias=False)
            self.head.weight = self.embed.weight

    model = Tied().state_dict()
    path = Checkpoints(tmp_path).save(1, run_state(1) | {"model": model})
    loaded = load(path).state["model"]
    assert_same(loaded, dict(model))
    assert loaded["head.weight"].data_ptr() == loaded["embed.weight"].data_ptr()
    assert (path / PART).stat().st_size < 1000 * 16 * 4 + 1000


def test_views_of_one_memory_come_back(tmp_path: Path) -> None:
    flat = torch.arange(12.0)
    model = {
        "a": flat,
        "as_square": flat.view(3, 4),
        "part": flat[2:5],
        "overlap": flat[4:9],
        "row": flat.view(3, 4)[:, 1],
    }
    path = Checkpoints(tmp_path).save(1, run_state(1) | {"model": model})
    assert_same(load(path).state["model"], model)


def test_a_small_view_does_not_drag_its_storage_along(tmp_path: Path) -> None:
    state = run_state(1) | {"scaler": {"scale": torch.zeros(1_000_000)[:2]}}
    path = Checkpoints(tmp_path).save(1, state)
    assert (path / EXTRA_STATE).stat().st_size < 100_000


def test_schedules_and_optimizers_of_torch_come_back(tmp_path: Path) -> None:
    model = nn.Linear(3, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    named = optimizer_state(model, optimizer)
    state = run_state(1) | {"optimizer": named, "scheduler": schedule.state_dict()}
    loaded = load(Checkpoints(tmp_path).save(1, state)).state
    assert_same(loaded["optimizer"], named)
    assert isinstance(loaded["scheduler"]["milestones"], Counter)
    schedule.load_state_dict(loaded["scheduler"])


def test_numbers_and_arrays_of_numpy_come_back_as_they_were(tmp_path: Path) -> None:
    """Single precision that came back as a number of Python's would be computed with in double."""

    class Mode(str, enum.Enum):  # noqa: UP042 - its str() is not its value
        MINIMUM = "min"

    odd = {
        "lr": np.float64(0.1),
        "scale": np.float32(0.97),
        "half": np.float16(0.1),
        "count": np.int64(3),
        "flag": np.bool_(True),
        "complex": np.complex64(1 + 2j),
        "name": np.str_("é"),
        "nested": [{"deep": (np.int8(-3),)}],
    }
    arrays = {
        "table": np.arange(6, dtype=np.float32).reshape(2, 3)[:, ::-1],
        "names": np.array(["a", "bc"]),
        "one": np.array(2.5),
        "none": np.zeros((0, 3), dtype=np.uint16),
    }
    state = run_state(1) | {"scheduler": {**odd, **arrays, "mode": Mode.MINIMUM, "by": {np.int64(2): 1}}}
    loaded = load(Checkpoints(tmp_path).save(1, state)).state["scheduler"]
    assert {name: loaded[name] for name in odd} == odd
    assert [type(loaded[name]) for name in odd] == [type(value) for value in odd.values()]
    assert type(loaded["nested"][0]["deep"][0]) is np.int8
    for name, array in arrays.items():
        assert isinstance(loaded[name], np.ndarray), name
        assert loaded[name].dtype == array.dtype
        assert loaded[name].shape == array.shape
        assert np.array_equal(loaded[name], array)
        loaded[name][...] = loaded[name]  # it can be written to
    assert loaded["mode"] == "min"
    assert type(loaded["mode"]) is str
    assert [type(key) for key in loaded["by"]] == [int]


def test_a_file_that_names_a_type_of_objects_is_refused(tmp_path: Path) -> None:
    from paceline.checkpoint import extra_state

    for wrong in (
        ("|O", None, b"12345678"),
        ("<f4", (7,), b"1234"),
        ("<f4", None, b""),
        "float32",
        ("<q9", None, b""),
    ):
        rest = {"optimizer": {"state": {}, "groups": []}, "scheduler": {"x": {extra_state._NUMPY: wrong}}}
        torch.save(rest, tmp_path / "extra_state.pt")
        with pytest.raises(CheckpointError, match=r"extra_state.pt"):
            extra_state.read_extra_state(tmp_path)


def test_parts_beyond_the_usual_ones_are_kept(tmp_path: Path) -> None:
    state = run_state(1) | {"averages": {"layer.bias": torch.ones(2)}}
    assert_same(load(Checkpoints(tmp_path).save(1, state)).state, state)


def test_meta_with_keys_that_are_numbers_and_letters_of_any_script(tmp_path: Path) -> None:
    state = run_state(1) | {"meta": {"task": "Zahlen-Ä", "by_rank": {10: "a", 2: "b"}, "rate": 0.1 + 0.2}}
    meta = load(Checkpoints(tmp_path).save(1, state)).meta
    assert meta == {"task": "Zahlen-Ä", "by_rank": {"10": "a", "2": "b"}, "rate": 0.1 + 0.2}


@pytest.mark.parametrize(
    ("part", "says"),
    [
        ({"scheduler": {"lambdas": [abs]}}, "scheduler.lambdas[0]: it is a builtin_function_or_method"),
        ({"model": {"x": torch.eye(2).to_sparse()}}, "cannot save x: it is a torch.sparse_coo tensor"),
        ({"model": {"x": torch.empty(2, device="meta")}}, "tensor on meta"),
        ({"model": {"x": 3}}, "cannot save x: it is a int"),
        ({"model": {"x": torch.zeros(1, dtype=torch.complex128)}}, "cannot save x: safetensors has no type"),
        ({"meta": {"path": object()}}, "cannot save position and meta of step 1"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_named(tmp_path: Path, part: dict[str, object], says: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        Checkpoints(tmp_path).save(1, run_state(1) | part)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
