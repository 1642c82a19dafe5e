"""A linear probe on a harvest, layer by layer: python examples/probe.py HARVEST LABELS

LABELS has a number for every prompt, one a line. A fifth of the prompts is held out; a prompt's row is its last token's.
"""

import sys
from pathlib import Path

import numpy as np
from sklearn.linear_model import LogisticRegression
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import ster

if len(sys.argv) != 3:
    print((__doc__ or "").strip())
    sys.exit(2 * (sys.argv[1:] not in (["-h"], ["--help"])))

harvest = ster.open_harvest(sys.argv[1])
labels = np.array(Path(sys.argv[2]).read_text().split(), dtype=int)
if len(labels) != len(harvest):
    sys.exit(f"{len(labels)} labels for {len(harvest)} prompts")

held_out = np.random.default_rng(0).permutation(len(labels)) < len(labels) // 5
for layer in harvest.layers:
    rows = np.stack([prompt.layer(layer)[-1] for prompt in harvest])
    probe = make_pipeline(StandardScaler(), LogisticRegression(max_iter=1000))
    probe.fit(rows[~held_out], labels[~held_out])
    print(f"layer {layer:2}  held-out accuracy {probe.score(rows[held_out], labels[held_out]):.3f}")
