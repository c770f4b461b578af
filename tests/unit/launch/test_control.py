"""Orders to a run in progress: whoever asks badly, or goes away, harms nothing."""

import json
import socket
import threading

import pytest

from paceline.errors import InputError
from paceline.launch.control import NAME, ControlSocket, order


@pytest.fixture
def control(tmp_path):
    """A socket that takes orders, and the folder that names it."""
    made = ControlSocket(tmp_path, lambda request: f"{request['workers']} workers")
    yield made
    made.close()
    assert not (tmp_path / NAME).exists()


def connect(folder):
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    made.connect(json.loads((folder / NAME).read_text())["socket"])
    return made


def test_an_order_is_answered(control, tmp_path):
    server = threading.Thread(target=control.serve)
    server.start()
    assert order(tmp_path, {"do": "resize", "workers": 3}) == "3 workers"
    server.join()


@pytest.mark.parametrize("sent", [b"", b"nonsense", b"[1, 2]", b"{}", b'{"workers": {}}'])
def test_a_bad_order_gets_an_answer_and_one_who_is_gone_none(sent, control, tmp_path):
    with connect(tmp_path) as asking:
        if sent:
            asking.sendall(sent)
        else:
            asking.close()
        control.serve()
    with connect(tmp_path) as asking:
        asking.sendall(sent or b"{")
        control.serve()
        reply = json.loads(asking.makefile().readline())
    assert reply["ok"] is (sent == b'{"workers": {}}')


def test_an_order_nested_beyond_measure_gets_an_answer(control, tmp_path):
    with connect(tmp_path) as asking:
        asking.sendall(b"[" * 4000)
        control.serve()
        assert not json.loads(asking.makefile().readline())["ok"]


@pytest.mark.parametrize("there", [None, "", "[]", '{"socket": "/nowhere"}'])
def test_no_run_under_way_is_one_line(there, tmp_path):
    if there is not None:
        (tmp_path / NAME).write_text(there)
    with pytest.raises(InputError, match=r"no run is in progress|does not answer"):
        order(tmp_path, {"do": "resize", "workers": 3})
