# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: the Farandole authors
"""Writes a system of four atoms with the forces of springs, and the input of a tiny training."""

import json
import sys
from pathlib import Path

import numpy as np

FRAMES, ATOMS, SIDE, LENGTH = 8, 4, 6.0, 1.5
folder = Path(sys.argv[1])
generator = np.random.default_rng(0)
grid = np.array([[0, 0, 0], [1.5, 0, 0], [0, 1.5, 0], [0, 0, 1.5]]) + 2
places = grid + 0.1 * generator.standard_normal((FRAMES, ATOMS, 3))
apart = places[:, :, None] - places[:, None]
lengths = np.linalg.norm(apart, axis=-1) + np.eye(ATOMS)
stretched = (lengths - LENGTH) * (1 - np.eye(ATOMS))
energies = (stretched**2).sum((1, 2)) / 4
forces = -(stretched[..., None] * apart / lengths[..., None]).sum(2)

system = folder / "system"
(system / "set.000").mkdir(parents=True)
(system / "type.raw").write_text("0 0 1 1\n")
(system / "type_map.raw").write_text("H\nO\n")
arrays = {
    "coord": places.reshape(FRAMES, -1),
    "box": np.tile(np.eye(3).ravel() * SIDE, (FRAMES, 1)),
    "energy": energies,
    "force": forces.reshape(FRAMES, -1),
}
for name, values in arrays.items():
    np.save(system / "set.000" / f"{name}.npy", values.astype("float64"))

training = {
    "model": {
        "type_map": ["H", "O"],
        "descriptor": {
            "type": "se_e2_a",
            "sel": [4, 4],
            "rcut": 3.0,
            "rcut_smth": 0.5,
            "neuron": [4, 8],
            "axis_neuron": 2,
            "seed": 1,
        },
        "fitting_net": {"neuron": [8, 8], "seed": 1},
    },
    "learning_rate": {"type": "exp", "start_lr": 0.01, "stop_lr": 0.001, "decay_steps": 10},
    "loss": {"type": "ener"},
    "training": {
        "training_data": {"systems": [str(system)], "batch_size": 2},
        "numb_steps": 30,
        "seed": 1,
        "disp_freq": 10,
        "save_freq": 30,
        "disp_file": str(folder / "lcurve.out"),
        "save_ckpt": str(folder / "model.ckpt"),
    },
}
(folder / "input.json").write_text(json.dumps(training))
