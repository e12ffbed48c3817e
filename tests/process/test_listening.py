"""Listening sockets: no second process can open a port."""

import socket
from contextlib import ExitStack
from functools import partial

import pytest

from app.process.listening import ListeningPortTaken, listening, reserved


def test_a_port_belongs_to_one_socket_until_its_block_ends() -> None:
    with listening("127.0.0.1", 0, "GATEWAY_PORT") as first:
        port = first.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port), 5) as client:  # before the server runs
            assert client.getpeername() == first.getsockname()
        taken = pytest.raises(ListeningPortTaken, match=f"GATEWAY_PORT: cannot listen on 127.0.0.1:{port}")
        with taken, listening("127.0.0.1", port, "GATEWAY_PORT"):
            pass
    with listening("127.0.0.1", port, "GATEWAY_PORT") as second:
        assert second.getsockname()[1] == port


def test_an_unknown_host_is_reported() -> None:
    unknown = pytest.raises(ListeningPortTaken, match=r"GATEWAY_PORT: cannot listen on host\.invalid:0")
    with unknown, listening("host.invalid", 0, "GATEWAY_PORT"):
        pass


def test_sockets_on_one_port_share_its_connections() -> None:
    with reserved("127.0.0.1", 0, "GATEWAY_PORT") as port, ExitStack() as stack:
        open_one = partial(listening, "127.0.0.1", port, "GATEWAY_PORT", shares_port=True)
        listeners = [stack.enter_context(open_one()) for _ in range(2)]
        clients = [socket.create_connection(("127.0.0.1", port), 5) for _ in range(64)]
        for each in listeners:
            each.setblocking(False)
            each.accept()[0].close()  # each socket has received connections
        for client in clients:
            client.close()


def test_a_reserved_port_receives_no_connections() -> None:
    with reserved("127.0.0.1", 0, "GATEWAY_PORT") as port, pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), 5)


def test_other_sockets_cannot_join_a_shared_port() -> None:
    """The kernel alone would allow it for the same user."""
    with (
        reserved("127.0.0.1", 0, "GATEWAY_PORT") as port,
        listening("127.0.0.1", port, "GATEWAY_PORT", shares_port=True),
    ):
        for again in (listening("127.0.0.1", port, "GATEWAY_PORT"), reserved("127.0.0.1", port, "X")):
            with pytest.raises(ListeningPortTaken, match=f"cannot listen on 127.0.0.1:{port}"), again:
                pass
