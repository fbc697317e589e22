"""What ranks used."""

import socket

import pytest

from recmill.training.rank.usage import UsageMeter, sent_bytes


def test_the_meter_counts_bytes_sent_over_loopback_and_leaves_out_what_is_sent_while_it_stands():
    if not sent_bytes():
        pytest.skip("the system does not count what its interfaces send")
    meter = UsageMeter()
    meter.start()
    send(1 << 20)
    meter.stop()
    counted = meter.used["loopback_bytes"]
    send(1 << 20)
    meter.stop()
    assert counted >= 1 << 20
    assert meter.used["loopback_bytes"] == counted


def test_only_the_interfaces_that_gloo_was_told_are_counted(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nosuch0")
    assert set(sent_bytes()) <= {"lo"}


def send(num_bytes):
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as client:
        received, _ = server.accept()
        with received:
            for _ in range(0, num_bytes, 1 << 14):
                client.sendall(bytes(1 << 14))
                left = 1 << 14
                while left:
                    left -= len(received.recv(left))
