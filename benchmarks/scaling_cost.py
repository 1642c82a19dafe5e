"""What a harvest of 1e9 tokens costs: hours, bytes on disk, bytes over the wire. Arithmetic on measured numbers; docs/scaling.md quotes it.

    .venv/bin/python -m benchmarks.scaling_cost
    .venv/bin/python -m benchmarks.scaling_cost --inputs inputs.json   # your own, from benchmarks.harvesting

Tables in Markdown go to stdout.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass
from pathlib import Path

TOKENS = 1e9
LAYERS = 3
STORED = 2  # bytes of a bf16

# Two cores of an AMD EPYC (family 23, AVX2) under KVM, SmolLM2-135M in bf16: `chrt -f 10 .venv/bin/python -m
# benchmarks.harvesting --model DIR --ray`.
MEASURED = {
    "harvest_process_tokens_per_s": 311.0,
    "extract_process_tokens_per_s": 315.0,
    "tokens_per_s": 343.0,
    "ray_two_workers_tokens_per_s": 354.0,
    "disk_bytes_per_s": 264e6,
    "file_bytes_per_s": 234e6,
    "statistics_bytes_per_s": 206e6,
    "wire_encode_bytes_per_s": 194e6,
    "wire_decode_bytes_per_s": 147e6,
    "wire_bytes_per_byte": 1.06,
}
MEASURED_CORES = 2

# Not measured.
GPU_FLOPS = 400e12  # a second, of a bf16 prefill on one large GPU
NETWORK = 1.25e9  # bytes a second: 10 Gbit/s
BIG_CORES = 32  # of a larger machine, each as fast as one that was measured

NODES = (1, 2, 4, 8, 16, 32, 64)
GPUS = (1, 8, 64)


@dataclass(frozen=True)
class Shape:
    """A model of the Llama family. kv: width of keys and of values."""

    name: str
    hidden: int
    kv: int
    mlp: int
    blocks: int

    @property
    def flops(self) -> int:
        """Of a token through the blocks that run for the default layers, the last of which is at three quarters."""
        return self.block_flops * (self.blocks * 3 // 4 + 1)

    @property
    def block_flops(self) -> int:
        """Without attention's products of rows with rows, which are few in short prompts."""
        return 2 * (2 * self.hidden**2 + 2 * self.hidden * self.kv + 3 * self.hidden * self.mlp)

    @property
    def bytes(self) -> int:
        """Of a token in the files."""
        return LAYERS * self.hidden * STORED


MODELS = (
    Shape("SmolLM2 135M", 576, 192, 1536, 30),
    Shape("Llama 3.2 1B", 2048, 512, 8192, 16),
    Shape("Llama 3.1 8B", 4096, 1024, 14336, 32),
)


@dataclass(frozen=True)
class Rates:
    """Tokens a second of a model. computed: by the machine that was measured. written: by one process, files and statistics."""

    computed: float
    on_ray: float
    written: float
    encoded: float
    decoded: float
    sent: float
    gpu: float


def rates(model: Shape, measured: dict[str, float]) -> Rates:
    scale = MODELS[0].flops / model.flops
    return Rates(
        computed=measured["tokens_per_s"] * scale,
        on_ray=measured["ray_two_workers_tokens_per_s"] * scale,
        written=1 / (model.bytes / measured["file_bytes_per_s"] + model.bytes / measured["statistics_bytes_per_s"]),
        encoded=measured["wire_encode_bytes_per_s"] / model.bytes,
        decoded=measured["wire_decode_bytes_per_s"] / model.bytes,
        sent=NETWORK / (model.bytes * measured["wire_bytes_per_byte"]),
        gpu=GPU_FLOPS / (model.block_flops * model.blocks),  # vLLM runs them all
    )


def ray_rate(found: Rates, model: Shape, nodes: float, cores: int) -> float:
    """Workers compute, one process writes what comes over its network: the slowest decides."""
    return min(nodes * found.on_ray * cores / MEASURED_CORES, found.written, NETWORK / model.bytes)


def vllm_rate(found: Rates, gpus: int) -> tuple[float, str]:
    """Tokens a second, and what decides. One core on the side of each GPU encodes; of the client one decodes and another writes."""
    bounds = {
        "GPUs": gpus * found.gpu,
        "encoding": gpus * found.encoded,
        "decoding": found.decoded,
        "writing": found.written,
        "network": found.sent,
    }
    slowest = min(bounds, key=lambda name: bounds[name])
    return bounds[slowest], slowest


def hours(rate: float) -> str:
    """
    >>> hours(1e9 / 3600), hours(30_000), hours(300)
    ('1.0', '9.3', '930')
    """
    return figure(TOKENS / rate / 3600)


def figure(number: float) -> str:
    return f"{number:.1f}" if number < 10 else f"{float(f'{number:.2g}'):,.0f}"


def table(head: list[str], rows: list[list[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def report(measured: dict[str, float]) -> str:
    one, ray, limit, wire = [], [], [], []
    for model in MODELS:
        found = rates(model, measured)
        network = model.bytes * measured["wire_bytes_per_byte"] * TOKENS
        one.append(
            [
                model.name,
                f"{model.flops / 1e9:.2g}",
                figure(found.computed),
                hours(min(found.computed, found.written)),
                f"{(model.bytes + 4) * TOKENS / 1e12:.2g} TB",
                f"{network / 1e12:.2g} TB",
            ]
        )
        ray.append([model.name, *(hours(ray_rate(found, model, nodes, MEASURED_CORES)) for nodes in NODES)])
        most = min(found.written, NETWORK / model.bytes)
        limit.append(
            [
                model.name,
                figure(most),
                hours(most),
                figure(most / found.on_ray),
                figure(most / found.on_ray * MEASURED_CORES / BIG_CORES),
            ]
        )
        wire.append([model.name, *(f"{hours(rate)} ({why})" for rate, why in (vllm_rate(found, gpus) for gpus in GPUS))])
    return "\n".join(
        [
            table(["one machine", "GFLOP a token", "tokens/s", "hours", "on disk", "over the wire"], one),
            table(["hours on Ray", *(f"{nodes} machine{'s' if nodes > 1 else ''}" for nodes in NODES)], ray),
            table(["the writing process", "tokens/s", "hours", "reached by machines", f"of {BIG_CORES} cores"], limit),
            table(["hours with vLLM", *(f"{gpus} GPU{'s' if gpus > 1 else ''}" for gpus in GPUS)], wire),
        ]
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=Path, help="JSON with keys as in MEASURED")
    inputs: Path | None = parser.parse_args().inputs
    given = {} if inputs is None else json.loads(inputs.read_text(encoding="utf-8"))
    sys.stdout.write(report({**MEASURED, **given}))


if __name__ == "__main__":
    main()
