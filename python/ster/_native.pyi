"""The Rust engine as Python sees it. `ster.Model` is the friendly face; this is the whole of what crosses the border."""

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Literal, final

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

__all__ = ["Cache", "Edit", "Engine", "Output", "Sequence", "Tensors", "__version__", "families", "gguf_metadata", "sample"]

__version__: str

@final
class Edit:
    """One addition to the residual stream: after block `layer`, `vectors` times `scale`.

    vectors: float32 `[n, hidden]`. Without `positions` n is 1 and the vector is added at every row that runs;
    with `positions` (absolute, 0 = first token) n is 1 or `len(positions)`.
    norm_match: add `scale * ||h|| * v / ||v||` instead, `||h||` the norm of the whole unsteered row.

    Raises:
        SteeringError: wrong shapes, a value that is not finite, a repeated position, a zero vector to norm-match.
    """

    def __new__(
        cls,
        layer: int,
        vectors: NDArray[np.float32],
        *,
        scale: float = 1.0,
        positions: Seq[int] | None = None,
        norm_match: bool = False,
    ) -> Self: ...
    @property
    def layer(self) -> int: ...
    @property
    def scale(self) -> float: ...
    @property
    def positions(self) -> list[int] | None: ...
    @property
    def norm_match(self) -> bool: ...
    @property
    def vectors(self) -> NDArray[np.float32]: ...

@final
class Cache:
    """Keys and values of one sequence, so that it can go on where it stopped. Belongs to the engine that made it."""

    @property
    def length(self) -> int:
        """Tokens held; the position of the next one."""

    @property
    def shortest(self) -> int:
        """The least length it can be forked at: layers with a sliding window forget what no later token sees. 0 without a window."""

    @property
    def bytes(self) -> int:
        """Memory of the blocks held, shared ones included."""

    def fork(self, length: int | None = None) -> Cache:
        """A second cache with the first `length` tokens of this one; full blocks are shared, not copied.

        Raises:
            CacheError: more than it holds, or fewer than `shortest`.
        """

@final
class Sequence:
    """What to run for one sequence, and what to keep of it.

    tokens: uint32 `[tokens]`, run after what `cache` or `prefix` holds. A cache is extended; a prefix is only read, and any number of
    sequences of a batch may go on from one. Without a cache nothing is kept for later.
    layers: blocks to capture, ascending and unique. rows: every row that runs now, or the last one alone.
    logits: for no row, the last, or all.
    """

    def __new__(
        cls,
        tokens: NDArray[np.uint32],
        *,
        cache: Cache | None = None,
        prefix: Cache | None = None,
        steering: Seq[Edit] = (),
        layers: Seq[int] = (),
        rows: Literal["last", "all"] = "last",
        point: Literal["pre_steer", "post_steer"] = "pre_steer",
        logits: Literal["none", "last", "all"] = "none",
    ) -> Self: ...

@final
class Output:
    """residual: float32 `[layers, rows, hidden]`, or None when no layer was asked for. logits: float32 `[rows, vocab]` or None.
    steered: per edit, in the order given, the absolute positions it reached in this pass."""

    @property
    def residual(self) -> NDArray[np.float32] | None: ...
    @property
    def logits(self) -> NDArray[np.float32] | None: ...
    @property
    def steered(self) -> list[list[int]]: ...

@final
class Engine:
    """A checkpoint, memory-mapped, ready to run: a folder or a GGUF file. Every tensor is checked against the config here, no weight is
    read.

    round: round all weights to this first; those that are not stored so are read after all, and held in memory.
    progress: called with the bytes rounded so far and in all.

    Raises:
        CheckpointError: a file or tensor that is missing, truncated or not what the config says.
        ConfigError: a field of config.json that is missing, contradictory or not supported.
    """

    def __new__(
        cls,
        path: str,
        *,
        threads: int | None = None,
        round: Literal["f16", "bf16"] | None = None,
        progress: Callable[[int, int], object] | None = None,
    ) -> Self: ...
    @property
    def layer_count(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...
    @property
    def vocab_size(self) -> int:
        """Rows of the embedding; the tokenizer may know fewer or more."""

    @property
    def context_length(self) -> int: ...
    @property
    def chunkable(self) -> bool:
        """A sequence may run in pieces without a bit changing; False with dynamic and longrope scaling alone, which look at the length."""

    @property
    def switches_after(self) -> int | None:
        """With longrope, the length up to which cached keys hold: a sequence that grows beyond it must run again from its start, which
        the engine asks for by refusing to go on. None: never."""

    @property
    def family(self) -> str:
        """`model_type`, as in `families()`."""

    @property
    def sliding_window(self) -> int | None:
        """How many tokens, itself included, a token sees in the layers that have a window."""

    @property
    def bos_token_id(self) -> int | None: ...
    @property
    def eos_token_ids(self) -> list[int]: ...
    @property
    def weight_dtypes(self) -> list[str]:
        """Dtypes of the weights, as stored or as rounded: "F32", "F16", "BF16", and GGUF's own such as "Q4_K"."""

    @property
    def weight_bytes(self) -> int: ...
    @property
    def kernels(self) -> str:
        """Which kernels run: "avx512", "avx2", "neon" or "portable": what `STER_KERNELS` names, or the best this processor has."""

    @property
    def threads(self) -> int: ...
    @property
    def warnings(self) -> list[str]:
        """What loading noticed and went on from: stray files, a tied checkpoint with a second head."""

    @property
    def cache_block_bytes(self) -> int:
        """Memory of one block of a cache: keys and values of 64 positions in all layers. Caches grow by whole blocks."""

    def cache(self) -> Cache: ...
    def forward(self, sequences: Seq[Sequence]) -> list[Output]:
        """One pass over all sequences, packed without padding; leaves the GIL; Ctrl-C stops it within a second.

        A cache is extended by its tokens, or left as it was when the pass fails.

        Raises:
            LayerError, TokenError, ContextError, SteeringError: before anything runs.
            NonFiniteError: NaN or infinity appeared; names layer and token.
            KeyboardInterrupt
        """

@final
class Tensors:
    """The tensors of a model folder or GGUF file under the names and in the order transformers gives them. Headers are read, no tensor is.

    Raises:
        CheckpointError, ConfigError: as for `Engine`.
    """

    def __new__(cls, path: str) -> Self: ...
    @property
    def shapes(self) -> list[tuple[str, list[int]]]:
        """Names, in alphabetical order, and shapes."""

    def rows(self, name: str, start: int, stop: int) -> NDArray[np.float32]:
        """Rows `start` to `stop` of a tensor, widened to float32 `[rows, width]`; a vector is one row. Leaves the GIL.

        The gains of Gemma's norms, which GGUF stores as 1 + w, are w where that is exact for the whole vector.

        Raises:
            CheckpointError: no such tensor or rows, or a dtype that is not read.
        """

def families() -> list[tuple[str, str]]:
    """Of every family that runs, its `model_type` and what it adds to Llama; Llama first."""

def gguf_metadata(path: str) -> dict[str, object]:
    """The metadata of a GGUF file, in alphabetical order; of a split model, of its first file.

    Values are int, float, bool and str; lists of strings `list[str]`, of booleans `list[bool]`, of numbers NumPy arrays of the stored
    type; lists of lists are lists.

    Raises:
        CheckpointError: a file that is missing, damaged or not GGUF.
        ConfigError: a key whose value breaks the format.
    """

def sample(
    logits: NDArray[np.float32],
    text: Seq[int],
    *,
    allowed: int | None = None,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    seed: int = 0,
    step: int = 0,
) -> int:
    """The next token from logits `[vocab]`: the likeliest at temperature 0, else drawn. The same on every machine.

    Filters, in this order: repetition penalty over the ids of `text`, temperature, top-k, top-p, min-p. allowed: only ids below it.
    step: how many tokens were drawn before; a draw depends on seed and step alone.

    Raises:
        InputError: a setting out of its range.
    """
