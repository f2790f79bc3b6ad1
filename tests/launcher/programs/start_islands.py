# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A driver that starts hosts, each with a cable to the driver and no other."""

import json
import subprocess
import sys

from farandole._native.registrar import Registrar

places, agent, *command = json.loads(sys.argv[1])


def ip(*words):
    subprocess.run(["ip", *words], check=True)


ip("link", "set", "lo", "up")
hosts = []
for number, tasks in enumerate(places):
    own = [
        "unshare",
        "--net",
        "--ipc",
        "--uts",
        "--",
        sys.executable,
        agent,
        f"island-{number}",
        json.dumps(tasks),
        *command,
    ]
    host = subprocess.Popen(own, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert host.stdout.readline() == "ready\n"
    far = ["nsenter", "--target", str(host.pid), "--net", "ip"]
    ip(
        "link",
        "add",
        f"port{number}",
        "type",
        "veth",
        "peer",
        "name",
        "eth0",
        "netns",
        str(host.pid),
    )
    ip("address", "add", f"10.231.{number}.1/24", "dev", f"port{number}")
    ip("link", "set", f"port{number}", "up")
    for words in (
        ["link", "set", "lo", "up"],
        ["address", "add", f"10.231.{number}.2/24", "dev", "eth0"],
        ["link", "set", "eth0", "up"],
    ):
        subprocess.run([*far, *words], check=True)
    hosts.append(host)
with Registrar(sum(map(len, places)), start_timeout=60.0) as registrar:
    for host in hosts:
        host.stdin.write(registrar.ticket + "\n")
        host.stdin.flush()
    ended = 0
    while any(host.poll() is None for host in hosts):
        for event in registrar.events(0.25):
            if event.kind == "log":
                print(event.stream, event.text, flush=True)
    for event in registrar.events(0.0):
        if event.kind == "log":
            print(event.stream, event.text, flush=True)
