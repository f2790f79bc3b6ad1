# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Servers of the package on unusual hosts and under crowds of connections."""

from __future__ import annotations

import http.client
import os
import shutil
import socket
import subprocess
import sys
import threading
import time

import pytest
from tests.needs import skip_without
from tests.programs import program_path

from farandole.spark.common.show import stop_button
from farandole.tensorflow.data import _registry

LIMIT = 60.0
"""Longest time for a child process, in seconds."""


class CountingStop:
    """A stop request that counts the clicks."""

    in_order = True

    def __init__(self):
        self.clicks = 0

    def request_stop(self):
        self.clicks += 1

    def end_unless_double_click(self):
        return True


def click(endpoint):
    line = http.client.HTTPConnection("127.0.0.1", endpoint.port, timeout=60.0)
    line.request("POST", f"{endpoint.path}stop")
    status = line.getresponse().status
    line.close()
    return status


@pytest.mark.parametrize("sent", [b"", b"POST /", b"POST / HTTP/1.1\r\nHost: x\r\n"])
def test_connections_that_say_nothing_keep_no_click_of_the_stop_button_out(monkeypatch, sent):
    create = stop_button._create_handler
    # A click that waited until a silent connection is closed for its silence would not come.
    monkeypatch.setattr(
        stop_button,
        "_create_handler",
        lambda actions: type("Patient", (create(actions),), {"timeout": 600.0}),
    )
    stop = CountingStop()
    endpoint = stop_button.StopEndpoint(stop)
    before = threading.active_count()
    crowd = []
    try:
        for number in range(150):
            line = socket.create_connection(("127.0.0.1", endpoint.port), 60.0)
            line.sendall(sent)
            crowd.append(line)
            if number % 50 == 0:
                assert click(endpoint) == 204
        assert click(endpoint) == 204
        assert stop.clicks == 4
        allowed = before + stop_button._MAX_STOP_CONNECTIONS + 4
        deadline = time.monotonic() + 30.0
        while threading.active_count() > allowed and time.monotonic() < deadline:
            time.sleep(0.05)
        assert threading.active_count() <= allowed
    finally:
        for line in crowd:
            line.close()
        endpoint.close()


@pytest.mark.parametrize(
    "named", [[], ["127.0.1.1"], ["127.0.1.1", "::1", "fe80::1%eth0"], ["203.0.113.7", "127.0.1.1"]]
)
def test_a_host_name_that_stands_for_loopback_offers_no_other_address(monkeypatch, named):
    infos = [(0, 0, 0, "", (text, 0)) for text in named]
    monkeypatch.setattr(_registry.socket, "getaddrinfo", lambda *_, **__: infos)
    found = _registry.local_host_addresses()
    assert "127.0.1.1" not in found
    assert not [text for text in found if text.startswith("fe80")]
    assert [text for text in named if text == "203.0.113.7"] == [
        text for text in found if text == "203.0.113.7"
    ]
    loopback = [text for text in found if text in ("127.0.0.1", "::1")]
    assert "127.0.0.1" in loopback
    assert found[-len(loopback) :] == loopback, "a host's own loopback comes last"


MEETS = program_path(__file__, "meet_on_loopback")
HOSTS = {
    "2001:db8:7::2": (
        "ip address flush dev lo; ip address add ::1/128 dev lo; "
        "ip address add 2001:db8:7::2/64 dev near nodad; ip route add default via 2001:db8:7::1"
    ),
    "198.51.100.2": (
        "sysctl -q -w net.ipv6.conf.all.disable_ipv6=1; "
        "ip address add 198.51.100.2/24 dev near; ip route add default via 198.51.100.1"
    ),
}
"""Addresses of hosts that have only one protocol, and the commands that make them."""


def namespaces_reason():
    """The reason why this machine has no network namespaces for tests; `None` if it has."""
    if os.geteuid() != 0:
        return "needs root, for network namespaces"
    tools = [tool for tool in ("unshare", "ip", "sysctl") if shutil.which(tool) is None]
    return f"needs {' '.join(tools)}" if tools else None


@pytest.mark.parametrize("address", HOSTS)
def test_the_meeting_point_is_reached_on_a_host_with_one_protocol(address):
    skip_without(namespaces_reason())
    script = (
        "ip link set lo up; ip link add near type veth peer name far; ip link set near up; "
        f'ip link set far up; {HOSTS[address]}; exec "$@"'
    )
    done = subprocess.run(
        ["unshare", "--net", "sh", "-c", script, "sh", sys.executable, MEETS],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT,
    )
    assert done.returncode == 0, done.stderr
    addresses, *hosts = done.stdout.splitlines()
    loopback = "::1" if ":" in address else "127.0.0.1"
    assert addresses.split() == [address, loopback]
    assert hosts == [f"[{text}]" if ":" in text else text for text in (address, loopback)]
