#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
#
# Allreduce between hosts that are network namespaces, next to torch Gloo in the same layout: see
# netns.py. SCRIPT runs another one in the same way: see simulated.sh.
# Everything lives in nameless namespaces whose first process dies with this script, so nothing is
# left behind.
set -eu
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-.venv/bin/python}"
skip() {
    echo "netns: skipped: $1"
    exit 0
}
[ "$(uname -s)" = Linux ] || skip "needs Linux"
[ "$(id -u)" = 0 ] || skip "needs root for network namespaces"
for tool in unshare ip; do
    command -v "$tool" >/dev/null || skip "needs the program $tool"
done
inside="unshare --net --ipc --uts --pid --fork --kill-child --mount-proc --"
$inside ip link add probe type veth peer name eborp 2>/dev/null || skip "this kernel gives no namespaces with veth pairs"
exec $inside "$PYTHON" "${SCRIPT:-bench/netns.py}" "$@"
