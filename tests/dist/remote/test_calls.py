"""Calls between real workers: two trainers and two servers, one launch for all that is looked at here."""

import json

import pytest

import paceline
from paceline.remote import Role
from tests.dist.remote.checks import check_all

SECRET = b"a secret that nobody may read"


@pytest.fixture(scope="module")
def launched(tmp_path_factory):
    out = tmp_path_factory.mktemp("roles") / "run"
    results = paceline.launch_roles(
        {"trainers": Role(check_all, workers=2), "servers": 2}, out=out, secret=SECRET, threads=1
    )
    return results, out


@pytest.fixture(scope="module")
def found(launched):
    return launched[0]["trainers"][0]


def test_results_come_by_role(launched):
    results, _ = launched
    assert list(results) == ["trainers", "servers"]
    assert results["trainers"][1] is None
    assert results["servers"] == (None, None)


def test_a_call_goes_from_worker_to_worker_and_back_to_the_first(found):
    assert found["hops"] == ["trainer:0", "server:0", "server:1", "trainer:1", "trainer:0", "server:0"]


def test_a_worker_calls_itself(found):
    assert found["own_calls"] == (7, "trainer:0", ["trainer:0"], 7)


def test_a_process_that_loads_data_cannot_call_as_its_worker(found):
    kind, words, after = found["forked"]
    assert (kind, after) == ("PacelineError", ["server:0"])
    assert "cannot be made from a process that was forked from one" in words


def test_types_and_docstrings_survive(found):
    signature = "(self, number: 'int' = 1) -> 'int'"
    words = ("Does small things.", "Add a number, and give the sum.")
    assert found["described"] == (*words, signature, True, "<Desk on server:0>")


def test_exceptions_arrive_as_themselves_with_the_remote_traceback(found):
    failures = found["failures"]
    assert failures["own"][:2] == ("OwnError", "no luck")
    assert failures["key"][:2] == ("KeyError", "'no luck'")
    assert failures["strange"][:2] == ("RemoteError", "StrangeError on server:0: no luck")
    assert failures["kept"][0] == "KeyError"
    assert failures["arguments"][0] == "TypeError"
    assert failures["leave"][:2] == ("RemoteError", "SystemExit on server:0: 3")
    assert failures["name"][0] == "UnknownNameError"
    for kind, (_, _, notes) in failures.items():
        assert "On server:0:\nTraceback" in notes, kind
    assert "in fail" in failures["own"][2]


def test_an_exception_that_crosses_two_workers_tells_of_both(found):
    kind, words, notes = found["failures"]["far"]
    assert (kind, words) == ("OwnError", "no luck")
    assert notes.index("On server:1:") < notes.index("On server:0:")


def test_a_value_that_cannot_be_sent_is_no_lost_worker(found):
    (kind, words, _), count, lost = found["unsendable"]
    assert (kind, count, lost) == ("RemoteError", 1, [])
    assert words.startswith(
        "Desk.unsendable on server:0 came to nothing, because a value could not be sent: TypeError"
    )
    assert "\n" not in words


def test_a_service_lives_until_its_pending_calls_are_answered(found):
    assert found["dropped"] == 8


def test_references_are_counted_on_every_worker_and_the_last_one_frees(found):
    references = found["references"]
    assert references["holders"] == [("trainer:0",), ("trainer:0", "server:1"), ("server:1",), ()]
    assert references["alive"] == (2, 1, 0)
    assert references["before"] == 0
    assert references["far"] == (4, 7)


def test_the_value_itself_is_only_given_where_it_is(found):
    kind, words, _ = found["references"]["local"]
    assert kind == "InputError"
    assert "Desk.thing is on server:0, not here" in words


def test_training_over_three_workers_equals_one_process_to_the_bit(found):
    assert found["gradients"] == (True, True)


def test_passes_of_two_workers_overlap_and_stay_apart(found):
    assert found["overlap"] == (True, True, 8)


def test_a_call_that_takes_too_long_is_given_up_and_may_still_be_carried_out(found):
    patience = found["patience"]
    kind, words, _ = patience["late"]
    assert (kind, words[:43]) == ("CallTimeoutError", "Desk.stall on server:0 gave no answer withi")
    assert patience["carried out"] == 1


def test_only_what_is_idempotent_is_tried_again(found):
    patience = found["patience"]
    assert patience["tries"] >= 3
    assert patience["given up"][0] == "CallTimeoutError"
    assert patience["calls without a retry"] == 1
    assert patience["not idempotent"][0] == "InputError"
    assert "Put @remote.idempotent above it" in patience["not idempotent"][1]
    assert patience["not a time"][0] == "InputError"


def test_batched_calls_are_computed_together(found):
    batches = found["batches"]
    assert batches["squares"] == [number * number for number in range(20)]
    assert sum(batches["sizes"]) == 20
    assert 1 < max(batches["sizes"]) <= 8
    assert batches["description"] == "Square a number."


def test_everybody_in_a_batch_hears_of_its_failure(found):
    batches = found["batches"]
    assert batches["failed"] == ["ZeroDivisionError", "ZeroDivisionError"]
    assert batches["left"] == [("RemoteError", "SystemExit on server:0: 3")] * 2
    assert [one[0] for one in batches["short"]] == ["RemoteError", "RemoteError"]
    assert "gave 1 results for 2 items" in batches["short"][0][1]
    assert batches["kept"][0] == "InputError"
    assert batches["two items"][0] == "TypeError"


@pytest.mark.parametrize(
    ("what", "kind", "words"),
    [
        ("class", "InputError", "put @remote.service above the class"),
        ("function", "InputError", "put @remote.function above it"),
        ("class there", "CallRefusedError", "os:_Environ is not registered as a service"),
        ("function there", "CallRefusedError", "os:getpid is not registered as a function"),
        ("named", "CallRefusedError", "posix.getpid is not registered"),
        ("made", "CallRefusedError", "builtins.eval is not registered"),
        ("unknown", "CallRefusedError", "there is no value of kind 'X'"),
        ("deep", "CallRefusedError", "could not be read: RecursionError"),
        ("missing", "CallRefusedError", "could not be read: ValueError: a frame is missing"),
        ("nonsense", "CallRefusedError", "could not be read: JSONDecodeError"),
        ("kind", "CallRefusedError", "there is no request of kind 99"),
        ("private", "CallRefusedError", "Desk offers no method '_private'"),
        ("argument", "CallRefusedError", "Unregistered is not registered, so no call may name it here"),
        ("answer", "CallRefusedError", "Unregistered is not registered, so no call may name it here"),
        ("right", "nothing", "['server:0']"),
        ("nobody", "UnknownNameError", "unknown worker 'server:7'. Did you mean 'server:"),
    ],
)
def test_what_may_not_be_called_is_refused(found, what, kind, words):
    assert found["refused"][what][0] == kind
    assert words in found["refused"][what][1]
    assert found["refused"]["untouched"] == 0


def test_refusals_are_in_the_log_of_the_worker_that_refused(launched):
    _, out = launched
    log = (out / "logs" / "rank-2.log").read_text()
    for words in ("posix.getpid is not registered", "os:_Environ is not", "'_private'", "could not be read"):
        assert words in log
    assert log.count("paceline: refused: ") == 11
    assert "Traceback" not in log


def test_workers_of_one_machine_listen_on_no_network(found):
    assert found["listening"] == []


def test_nothing_that_is_written_holds_the_secret_and_the_end_is_quiet(launched):
    _, out = launched
    assert json.loads((out / "spec.json").read_text()) == {"roles": {"trainers": 2, "servers": 2}}
    assert len(list((out / "logs").iterdir())) == 4
    for path in out.rglob("*"):
        if path.is_file():
            content = path.read_bytes()
            assert SECRET not in content
            assert SECRET.hex().encode() not in content
            assert b"pipe closed" not in content
