"""llama.cpp's process, through the C interface that llama-cpp-python binds. `settings`:

- `exact`: float32 throughout, which needs a float32 cache and flash attention off (with it, logits are 6e-4 away)
- `default`: a float16 cache, flash attention where llama.cpp likes it

Prompts are packed whole into batches of up to 512 tokens and the cache is emptied between batches: no padding, and no attention to
cells of prompts that are done. Residuals come from the evaluation callback, which stops each pass after the last block: no head.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp as lc  # type: ignore[import-not-found,unused-ignore]
import numpy as np
from benchmarks.worker import Job, Prompts, clock, serve

BATCH = 512
SEQUENCES = 32

Item = tuple[int, int, int, bool]
"""Token, position, sequence, and whether its row is wanted."""


class Llama:
    def __init__(self, job: Job) -> None:
        self._quiet = lc.llama_log_callback(lambda level, text, data: None)  # kept: C holds a pointer to it
        lc.llama_log_set(self._quiet, ctypes.c_void_p(0))
        lc.llama_backend_init()
        self.model = lc.llama_model_load_from_file(job["model"].encode(), _model_params())
        if not self.model:
            raise SystemExit(f"llama.cpp cannot load {job['model']}")
        self.last = int(lc.llama_model_n_layer(self.model)) - 1
        self.hidden = int(lc.llama_model_n_embd(self.model))
        self.vocab = lc.llama_vocab_n_tokens(lc.llama_model_get_vocab(self.model))
        params = lc.llama_context_default_params()
        params.n_ctx = max(BATCH, max(map(len, job["prompts"])) + job["new"])
        params.n_batch = params.n_ubatch = BATCH
        params.n_threads = params.n_threads_batch = job["threads"]
        params.n_seq_max, params.kv_unified = SEQUENCES, True
        if job["settings"] == "exact":
            params.type_k = params.type_v = lc.GGML_TYPE_F32
            params.flash_attn_type = lc.LLAMA_FLASH_ATTN_TYPE_DISABLED
        if job["kind"] == "residuals":
            self._watcher = lc.ggml_backend_sched_eval_callback(self._watch)
            params.cb_eval = self._watcher
            self._base = _base_library()
        self.context = lc.llama_init_from_model(self.model, params)
        self.memory = lc.llama_get_memory(self.context)
        self.batch = lc.llama_batch_init(BATCH, 0, 1)
        self._rows: list[int] = []  # of the batch that runs, whose residuals are wanted
        self._kept = np.empty((0, 0, 0), np.float32)  # [rows, layers, hidden]

    def _run(self, items: Sequence[Item]) -> None:
        batch = self.batch
        for start in range(0, len(items), BATCH):
            part = items[start : start + BATCH]
            batch.n_tokens = len(part)
            for i, (token, position, sequence, wanted) in enumerate(part):
                batch.token[i], batch.pos[i], batch.logits[i] = token, position, wanted
                batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
            self._rows = [i for i, item in enumerate(part) if item[3]]
            if lc.llama_decode(self.context, batch) != 0:
                raise SystemExit("llama_decode failed")
            lc.llama_synchronize(self.context)

    def _packed(self, prompts: Prompts) -> Iterator[None]:
        """Run `prompts` batch by batch, each in an empty cache; stop after each to let its rows be read."""
        lc.llama_memory_clear(self.memory, False)
        items: list[Item] = []
        for ids in prompts:
            if items and (len(items) + len(ids) > BATCH or items[-1][2] + 1 == SEQUENCES):
                self._run(items)
                yield
                lc.llama_memory_clear(self.memory, False)
                items = []
            sequence = items[-1][2] + 1 if items else 0
            items += [(token, at, sequence, at == len(ids) - 1) for at, token in enumerate(ids)]
        self._run(items)
        yield

    def _likeliest(self, row: int) -> int:
        return int(np.ctypeslib.as_array(lc.llama_get_logits_ith(self.context, row), shape=(self.vocab,)).argmax())

    def logits(self, prompts: Prompts) -> list[int]:
        return [self._likeliest(row) for _ in self._packed(prompts) for row in self._rows]

    def decode(self, prompt: Sequence[int], new: int) -> tuple[float, list[int]]:
        ids = self.logits([prompt])
        start = clock()
        for position in range(len(prompt), len(prompt) + new):
            self._run([(ids[-1], position, 0, True)])
            ids.append(self._likeliest(0))
        return clock() - start, ids

    def residuals(self, prompts: Prompts) -> list[list[list[float]]]:
        found: list[list[list[float]]] = []
        self._kept = np.empty((SEQUENCES, self.last + 1, self.hidden), np.float32)
        for _ in self._packed(prompts):
            found += self._kept[: len(self._rows)].tolist()
        return found

    def _watch(self, tensor: int, ask: bool, data: object) -> bool:
        """Asked: is this a block's output? Told: copy the rows wanted. The last block has those rows only; no more is computed after it."""
        name: bytes = self._base.ggml_get_name(tensor)
        if not name.startswith(b"l_out-"):
            return not ask
        if ask:
            return True
        layer = int(name.removeprefix(b"l_out-"))
        size = 4 * self.hidden
        for at, row in enumerate(self._rows):
            source = at if layer == self.last else row
            self._base.ggml_backend_tensor_get(tensor, self._kept[at, layer].ctypes.data, source * size, size)
        return layer != self.last


def _model_params() -> Any:
    params = lc.llama_model_default_params()
    params.n_gpu_layers = 0
    return params


def _base_library() -> ctypes.CDLL:
    base = ctypes.CDLL(str(next(Path(lc.__file__).parent.glob("lib/libggml-base.*"))))
    base.ggml_get_name.restype, base.ggml_get_name.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    base.ggml_backend_tensor_get.restype = None
    base.ggml_backend_tensor_get.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_size_t]
    return base


def versions() -> str:
    return f"llama-cpp-python {lc.__version__}, {lc.llama_print_system_info().decode().strip().removesuffix('|').strip()}"


if __name__ == "__main__":
    serve(Llama, versions)
