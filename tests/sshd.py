"""A real sshd for tests: with keys, a port and a configuration of its own, that nobody but the test can log in to."""

from __future__ import annotations

import contextlib
import getpass
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.patience import HANG_S, Stopwatch

SSHD = shutil.which("sshd", path="/usr/sbin:/usr/local/sbin:/usr/bin")
SEPARATION = Path("/run/sshd")
"""The empty folder that an sshd of root's wants; a service of the system's makes it."""
needs_sshd = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh") is None, reason="openssh-server and openssh-client are not installed"
)
_SERVER = """
Port {port}
ListenAddress {host}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/user_key.pub
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
PermitRootLogin prohibit-password
"""
_CLIENT = """
Port {port}
User {user}
IdentityFile {folder}/user_key
IdentitiesOnly yes
UserKnownHostsFile {folder}/known_hosts
"""


@contextlib.contextmanager
def sshd(
    folder: Path, host: str, run: Callable[..., subprocess.Popen[Any]], port: int = 2222
) -> Iterator[str]:
    """Have one sshd started by `run`, which answers at `host`; give the ssh that reaches it."""
    made = not SEPARATION.exists()
    SEPARATION.mkdir(exist_ok=True)
    for name in ("host_key", "user_key"):
        command = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
        subprocess.run(command, check=True, timeout=HANG_S)
    public = (folder / "host_key.pub").read_text()
    (folder / "known_hosts").write_text(f"[{host}]:{port} {public}")
    (folder / "sshd_config").write_text(_SERVER.format(port=port, folder=folder, host=host))
    (folder / "ssh_config").write_text(_CLIENT.format(port=port, folder=folder, user=getpass.getuser()))
    assert SSHD is not None
    with (folder / "sshd.log").open("wb") as log:
        process = run(
            [SSHD, "-D", "-e", "-f", str(folder / "sshd_config")], stderr=log, stdin=subprocess.DEVNULL
        )
    try:
        watch = Stopwatch()
        while b"Server listening" not in (folder / "sshd.log").read_bytes():
            assert process.poll() is None, (folder / "sshd.log").read_text()
            assert watch.seconds() < HANG_S
            time.sleep(0.02)
        yield f"ssh -F {folder / 'ssh_config'}"
    finally:
        process.terminate()
        process.wait(HANG_S)
        if made:
            SEPARATION.rmdir()
