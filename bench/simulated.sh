#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
#
# Allreduces between network namespaces, measured and simulated: see simulated.py.
set -eu
SCRIPT=bench/simulated.py exec "$(dirname "$0")/netns.sh" "$@"
