# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""A training that adds an average of ones in every step."""


def train(folder, steps):
    import os
    import pathlib
    import time

    import farandole.torch as hvd
    from farandole.common.elastic import ObjectState, leave_and_join, run_fn

    hvd.init()
    note = pathlib.Path(folder)
    (note / f"pid-{os.getpid()}").write_text(os.environ.get("FARANDOLE_SPARK_EXECUTOR", ""))
    state = ObjectState(hvd.broadcast_object, hvd.rank, step=0, total=0.0, worlds=[])

    def loop(state):
        state.worlds = [*state.worlds, (state.step, hvd.size())]
        while state.step < steps or (note / "hold").exists():
            import torch

            state.total += float(
                hvd.allreduce(torch.ones(1), name=f"step.{state.step}", op=hvd.Average)
            )
            state.step += 1
            if hvd.rank() == 0:
                (note / "step").write_text(f"{state.step} {hvd.size()}")
            time.sleep(0.05)
            state.commit()
        return hvd.rank(), hvd.size(), state.step, state.total, state.worlds

    return run_fn(loop, leave_and_join)(state)
