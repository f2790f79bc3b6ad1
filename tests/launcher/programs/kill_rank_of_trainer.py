# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A function that ends a rank of a Trainer at a step, once; the beginning of a script."""

import os
import signal
from pathlib import Path

import transformers


def kill_rank_at_step(trainer, rank, step, path):
    """Lets a rank be killed at the begin of a step, unless the file at the path exists."""

    class KillRank(transformers.TrainerCallback):
        def on_train_begin(self, args, state, control, **_):
            text = f"begins at step {state.global_step} with epoch {state.epoch}"
            print(f"rank {args.process_index}: {text}", flush=True)

        def on_step_begin(self, args, state, control, **_):
            is_due = state.global_step == step and args.process_index == rank
            if is_due and args.world_size > 1 and not Path(path).exists():
                Path(path).touch()
                os.kill(os.getpid(), signal.SIGKILL)

    trainer.add_callback(KillRank())
