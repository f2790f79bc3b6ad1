#!/bin/sh
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
#
# Steps between network namespaces that overlap with the next forward pass: see forward_overlap.py.
set -eu
SCRIPT=bench/forward_overlap.py exec "$(dirname "$0")/netns.sh" "$@"
