#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
#
# Training between network namespaces by DDP and by DiLoCo: see low_communication.py.
set -eu
SCRIPT=bench/low_communication.py exec "$(dirname "$0")/netns.sh" "$@"
