"""CURVE on ZeroMQ sockets: only who knows the run's secret gets through the handshake, and every frame is encrypted.

Both ends derive both key pairs from the secret. libzmq does the handshake, the encryption and the protection from replayed
and altered frames, and drops a connection that has not come through it in time.
"""

from __future__ import annotations

import zmq
from zmq.utils import z85

from paceline.transport.secret import Secret

HANDSHAKE_S = 5.0
"""How long a connection may take to prove itself; who is idle until then is dropped."""
_ZAP = "inproc://zeromq.zap.01"


class Doorkeeper:
    """Answers libzmq's question, in one context, whether a client's key is that of the run."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], secret: Secret) -> None:
        self.socket = context.socket(zmq.REP)
        """Readable when there is a question."""
        self.socket.linger = 0
        self.socket.bind(_ZAP)
        self._known = z85.decode(secret.key_pair("client").public)

    def answer(self) -> None:
        """Answer one question."""
        version, request, _, _, _, mechanism, *credentials = self.socket.recv_multipart()
        known = mechanism == b"CURVE" and credentials == [self._known]
        status = (b"200", b"OK") if known else (b"400", b"no key of this run")
        self.socket.send_multipart([version, request, *status, b"run" if known else b"", b""])


def serve(socket: zmq.Socket[bytes], secret: Secret) -> None:
    """Make a socket that will be bound take only clients that know the secret; its context needs a `Doorkeeper`."""
    keys = secret.key_pair("server")
    socket.curve_server = True
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.private
    socket.zap_domain = b"paceline"
    socket.handshake_ivl = int(HANDSHAKE_S * 1000)


def call(socket: zmq.Socket[bytes], secret: Secret) -> None:
    """Make a socket that will be connected prove that it knows the secret, and talk to nobody who does not."""
    keys = secret.key_pair("client")
    socket.curve_serverkey = secret.key_pair("server").public
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.private
    socket.handshake_ivl = int(HANDSHAKE_S * 1000)
