"""The run's secret."""

import pytest

from paceline.errors import InputError
from paceline.transport.secret import Secret
from paceline.world.run_secret import run_secret


def test_keys_differ_by_purpose_and_by_secret():
    one, other = Secret.make(), Secret.make()
    assert one.key("a", "b") == one.key("a", b"b") != one.key("ab") != one.key("a", "c")
    assert one.key("a") != other.key("a")
    assert one.key_pair("server") != one.key_pair("client")


def test_it_is_not_shown():
    made = Secret.make()
    assert made.text not in repr(made)
    assert made.key_pair("server").private.decode() not in repr(made.key_pair("server"))


def test_from_the_environment(monkeypatch, tmp_path):
    monkeypatch.delenv("PACELINE_SECRET", raising=False)
    monkeypatch.delenv("PACELINE_SECRET_FILE", raising=False)
    assert run_secret() is None
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef\n")
    monkeypatch.setenv("PACELINE_SECRET_FILE", str(file))
    file.chmod(0o644)
    with pytest.raises(InputError, match="chmod 600"):
        run_secret()
    file.chmod(0o600)
    assert run_secret() == Secret("0123456789abcdef")
    monkeypatch.setenv("PACELINE_SECRET", "another secret of the run")
    assert run_secret() == Secret("another secret of the run")
    monkeypatch.setenv("PACELINE_SECRET", "short")
    with pytest.raises(InputError, match="5 characters"):
        run_secret()
    monkeypatch.delenv("PACELINE_SECRET")
    file.unlink()
    with pytest.raises(InputError, match="No such file"):
        run_secret()
