"""What suits which machines; every command that is shown is one that the options accept."""

import shlex

import pytest

from paceline.doctor.advice import Machines, advise
from paceline.doctor.finding import Level, attempt, ok
from paceline.doctor.limits import CHANNEL_BYTES
from paceline.training.options import RunOptions
from paceline.world.shared_memory import SIZE

GIB = 2**30
CASES = {
    "one core": Machines(machines=1, devices=0, device_bytes=8 * GIB, cores=1),
    "cores": Machines(machines=1, devices=0, device_bytes=32 * GIB, cores=4),
    "one GPU": Machines(machines=1, devices=1, device_bytes=80 * GIB, cores=16),
    "GPUs": Machines(machines=1, devices=8, device_bytes=80 * GIB, cores=64),
    "machines": Machines(machines=4, devices=8, device_bytes=80 * GIB, cores=64),
    "machines of one GPU": Machines(machines=2, devices=1, device_bytes=16 * GIB, cores=8),
}


def strategies(there):
    return [one.command.split("--strategy ")[1].split()[0].partition("=")[0] for one in advise(there)]


def test_small_models_are_trained_by_as_many_workers_as_there_are_devices():
    firsts = {name: advise(there)[0].command for name, there in CASES.items()}
    assert firsts["one core"] == "paceline train task --strategy single"
    assert firsts["one GPU"] == "paceline train task --strategy single"
    assert firsts["cores"] == "paceline train task --strategy ddp --workers 4"
    assert firsts["machines"].endswith("--strategy ddp --workers 8 --nodes 4 --rendezvous HOST:29400")


def test_larger_ones_are_sharded():
    assert strategies(CASES["GPUs"]) == ["ddp", "fsdp", "tp", "hybrid"]
    assert strategies(CASES["machines"]) == ["ddp", "fsdp", "fsdp", "local-sgd", "hybrid"]
    assert "--offload" in advise(CASES["one GPU"])[1].command


def test_what_fits_grows_with_the_workers():
    there = CASES["GPUs"]
    assert there.whole == int(0.6 * 80 * GIB / 16)
    assert there.sharded == 8 * there.whole
    assert CASES["cores"].sharded <= 0.6 * 32 * GIB / 16  # workers of one host share its memory


@pytest.mark.parametrize("name", CASES)
def test_every_command_is_one_that_the_options_take(name):
    for one in advise(CASES[name]):
        words = shlex.split(one.command)[3:]
        given, place = {}, 0
        while place < len(words):
            flag = words[place].removeprefix("--").replace("-", "_")
            has_value = place + 1 < len(words) and not words[place + 1].startswith("--")
            given[flag] = words[place + 1] if has_value else True
            place += 2 if has_value else 1
        tuning = {
            flag: given.pop(flag)
            for flag in ("offload", "local_steps", "activation_checkpointing")
            if flag in given
        }
        numbers = {flag: int(given[flag]) for flag in ("workers", "servers") if flag in given}
        tuning |= {"local_steps": int(tuning["local_steps"])} if "local_steps" in tuning else {}
        assert RunOptions(**{**given, **numbers, "tuning": tuning}).choice


def test_a_check_that_fails_by_itself_says_so_and_stops_nothing():
    def broken():
        raise KeyError("MemTotal")

    (found,) = attempt("memory", broken)
    assert (found.check, found.level) == ("memory", Level.WARN)
    assert "could not be checked: KeyError: 'MemTotal'" in found.what
    assert attempt("memory", lambda: [ok("memory", "fine")]) == [ok("memory", "fine")]


def test_the_size_of_the_channel_is_the_real_one():
    assert CHANNEL_BYTES == SIZE
