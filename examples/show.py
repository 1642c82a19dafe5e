"""The first numbers of an activation artifact: python examples/show.py activations.json"""

import sys

import ster

acts = ster.ActivationArtifact.load(sys.argv[1])
print(f"{acts.model}: {len(acts.prompts)} prompts, layers {acts.layers}, hidden {acts.hidden_size}\n")
for prompt, vectors in zip(acts.prompts, acts.values, strict=True):
    print(prompt)
    for layer, vector in zip(acts.layers, vectors, strict=True):
        print(f"  layer {layer}  " + " ".join(f"{value:8.4f}" for value in vector[:6]) + "  ...")
