"""Whether machines reach each other, with real sockets."""

import os
import resource
import selectors
import socket
from pathlib import Path

from paceline.launch.nodes.reachability import ReachablePort


def test_where_no_more_files_may_be_opened_a_connection_is_closed_all_the_same():
    """Else the loop that serves the port would turn without a pause for as long as somebody waits there."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    with selectors.DefaultSelector() as selector:
        port = ReachablePort("127.0.0.1", selector)
        held = []
        with socket.create_connection((port.address, port.port)) as first:
            used = max(int(one.name) for one in Path("/proc/self/fd").iterdir())
            resource.setrlimit(resource.RLIMIT_NOFILE, (used + 1, limits[1]))
            try:
                while True:
                    held.append(os.open(os.devnull, os.O_RDONLY))
            except OSError:
                for key, _ in selector.select(5.0):
                    key.data()
                waiting = selector.select(0)
            finally:
                resource.setrlimit(resource.RLIMIT_NOFILE, limits)
                for one in held:
                    os.close(one)
            assert waiting == []
            assert first.recv(100) == b""
        port.close()
