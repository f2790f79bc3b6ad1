# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""`strategy="fsdp"`: models whose parameters, gradients and optimizer states are divided among
processes by FSDP2 (`torch.distributed.fsdp.fully_shard`).

The driver sends the user's objects without weights and writes the weights to the run's directory
(`driver_state`). Each process reads only its rows of each tensor, and writes only its rows for a
checkpoint (`state_files`), so no process ever holds the whole model. `units` decides which
modules are gathered at a time.

Checkpoints do not use `torch.distributed.checkpoint`: its files contain pickles, and it needs
local paths or fsspec where a run may be in any store.
"""
