"""The calls behind the commands. Whatever `ster` does in a shell is one of these in Python."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, overload

from ster import _native
from ster import steering_artifact as keys
from ster.abstract_model import AbstractModel
from ster.artifacts import ActivationArtifact, Position, TokenActivations
from ster.directions import DEFAULT_SEARCH, fit, parse_method
from ster.errors import InputError, SterWarning
from ster.evaluation import EvaluationReport as EvaluationReport
from ster.evaluation import evaluate as evaluate
from ster.layers import Layers, parse_layers
from ster.layers import spans as spans
from ster.pairs import PairSet
from ster.pairs_lint import groups
from ster.progress import Progress, reporter
from ster.scores import Candidate, Ranking, Split, fold_splits, holdout_split, rank_candidates, score
from ster.sides import TOKEN_RULE, Pairs, as_pair_set, pair_activations, pair_tokens, residual_norms
from ster.steering_artifact import LayerVector, SteeringArtifact


@overload
def extract(
    model: AbstractModel,
    prompts: Iterable[str],
    layers: Layers = "all",
    *,
    position: Literal["last", "mean"] = "last",
    progress: Progress = None,
) -> ActivationArtifact: ...


@overload
def extract(
    model: AbstractModel,
    prompts: Iterable[str],
    layers: Layers = "all",
    *,
    position: Literal["all"],
    progress: Progress = None,
) -> TokenActivations: ...


@overload
def extract(
    model: AbstractModel,
    prompts: Iterable[str],
    layers: Layers = "all",
    *,
    position: Position,
    progress: Progress = None,
) -> ActivationArtifact | TokenActivations: ...


def extract(
    model: AbstractModel,
    prompts: Iterable[str],
    layers: Layers = "all",
    *,
    position: Position = "last",
    progress: Progress = None,
) -> ActivationArtifact | TokenActivations:
    """Activations of `prompts`, ready to save: `ster extract` is this call and `.save`. See `ster.Model.activations`."""
    return model.activations(prompts, layers, position=position, progress=progress)


def train(
    model: AbstractModel, pairs: Pairs, layers: Layers = "all", *, method: str = "caa", progress: Progress = None
) -> SteeringArtifact:
    """A direction per layer from contrastive pairs: unit vectors that point to more of the trait.

    One pass over all sides reads every layer, at the last token, before any steering (see `ster.sides` for how a side is tokenised and
    `ster.directions` for the methods). Scores in the artifact are on the training pairs: `ster.evaluate` on others, or `ster.optimize`,
    says what they are worth.

    Args:
        pairs: a `PairSet`, or `(positive, negative)` tuples.
        layers: `"all"`, `5`, `"8..16"`, `[0, 3]`, ...
        method: `caa`, `pca`, `logistic`, `pca-centered`, `lda`, or an alias (`mean-difference`, `probe`).
        progress: True for a bar on stderr, or a function called with (done, total).

    Raises:
        InputError: pairs, layers or a method that cannot be used, before the first pass; a layer at which the sides do not differ.
        NonFiniteError: NaN or infinity in the model, by layer, token, pair and side.
    """
    pair_set = as_pair_set(pairs)
    name = parse_method(method)
    chosen = parse_layers(layers, model.layer_count)
    tokens = pair_tokens(model, pair_set)
    model.check_same()
    positive, negative = pair_activations(model, tokens, chosen, progress=progress)
    vectors, notes = [], {}
    with reporter(progress, "fit") as report:
        for i, layer in enumerate(chosen):
            try:
                found = fit(name, positive[:, i], negative[:, i])
            except InputError as error:
                raise InputError(f"{error.message} at layer {layer}", error.hint) from None
            each = score(positive[:, i], negative[:, i], found.direction)
            vectors.append(LayerVector(layer, found.direction, each.margin, each.accuracy))
            notes[layer] = found.notes
            report(i + 1, len(chosen))
    for note in fold_notes(notes):
        warnings.warn(note, SterWarning, stacklevel=2)
    norms = dict(zip(chosen, residual_norms(positive, negative), strict=True))
    return _artifact(model, pair_set, name, vectors, norms, progress)


@dataclass(frozen=True)
class Selection:
    """artifact: the winner, fitted on all pairs, at its one layer. ranking: all that was measured."""

    artifact: SteeringArtifact
    ranking: Ranking

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """Every method at every layer, with its held-out figures."""
        return self.ranking.candidates

    def to_dict(self) -> dict[str, Any]:
        """What `ster vector optimize` prints: the artifact's summary and `selection`."""
        return {**self.artifact.summary(), "selection": self.ranking.to_dict()}


def optimize(
    model: AbstractModel,
    pairs: Pairs,
    layers: Layers = "all",
    *,
    methods: Sequence[str] = DEFAULT_SEARCH,
    holdout: float = 0.2,
    folds: int | None = None,
    seed: int = 0,
    progress: Progress = None,
) -> Selection:
    """The method and layer that do best on pairs they were not fitted on, fitted again on all pairs.

    Pairs that tell nearly the same (see `ster.pairs_lint.groups`) are never on both sides of a split. One capture serves every candidate.

    Args:
        holdout: the share of pairs to rank on, the last ones in file order. folds: cross-validation instead, every pair held out once.
        seed: of the controls; the selection itself draws nothing.

    Raises:
        InputError: as in `train`; fewer than four pairs; a split that leaves nothing to train on.
    """
    pair_set = as_pair_set(pairs)
    names = [parse_method(method) for method in methods]
    chosen = parse_layers(layers, model.layer_count)
    splits = split_pairs(pair_set, holdout=holdout, folds=folds)
    tokens = pair_tokens(model, pair_set)
    model.check_same()
    positive, negative = pair_activations(model, tokens, chosen, progress=progress)
    with reporter(progress, "fit") as report:
        ranking = rank_candidates(positive, negative, chosen, splits, groups=groups(pair_set), methods=names, seed=seed, progress=report)
    winner = ranking.winner
    ranking = replace(ranking, notes=tuple(_ties(ranking) + list(dict.fromkeys(map(_without_figures, ranking.notes)))))
    vector = LayerVector(winner.layer, ranking.direction, ranking.refit.margin, ranking.refit.accuracy)
    at = chosen.index(winner.layer)
    norms = {winner.layer: residual_norms(positive[:, at : at + 1], negative[:, at : at + 1])[0]}
    artifact = _artifact(model, pair_set, winner.method, [vector], norms, progress)
    return Selection(
        artifact.with_metadata(
            selected_from=f"{len(ranking.candidates)} candidates",
            holdout_accuracy=repr(ranking.holdout.accuracy),
            holdout_margin=repr(ranking.holdout.margin),
            holdout_pairs=str(ranking.holdout_pairs),
        ),
        ranking,
    )


def split_pairs(pairs: PairSet, *, holdout: float = 0.2, folds: int | None = None) -> list[Split]:
    """The split `optimize` uses, or its splits with `folds`.

    Raises:
        InputError: see `ster.scores.holdout_split` and `fold_splits`.
    """
    together = groups(pairs)
    if folds is None:
        return holdout_split(len(pairs), holdout=holdout, groups=together)
    return fold_splits(len(pairs), folds=folds, groups=together)


def fold_notes(notes: Mapping[int, Sequence[str]]) -> list[str]:
    """Notes by layer -> one line for each kind. What stands in brackets, such as a figure, is left out where layers differ in it.

    >>> fold_notes({0: ["pca: odd (1)"], 1: ["pca: odd (2)"], 5: ["pca: odd (2)"]})
    ['pca: odd (layers 0, 1, 5)']
    """
    layers: dict[str, list[int]] = {}
    whole: dict[str, str] = {}
    for layer, texts in notes.items():
        for text in texts:
            kind = _without_figures(text)
            layers.setdefault(kind, []).append(layer)
            whole.setdefault(kind, text)
    return [f"{whole[kind]}, at layer {at[0]}" if len(at) == 1 else f"{kind} (layers {spans(at)})" for kind, at in layers.items()]


def _without_figures(note: str) -> str:
    return re.sub(r" \(.*\)$", "", note)


def _ties(ranking: Ranking) -> list[str]:
    """Margins are in the units of the activations, which grow from layer to layer: a reader should know what decided."""
    best = ranking.winner.holdout_accuracy
    tied = {c.layer for c in ranking.candidates if c.holdout_accuracy == best}
    if len(tied) < 2:
        return []
    return [
        f"{len(tied)} layers reach the winner's accuracy and the largest margin decided, which favours late layers, where activations are"
        " long; to steer, compare some of them with `ster vector evaluate --strengths`"
    ]


def _artifact(
    model: AbstractModel, pairs: PairSet, method: str, vectors: Sequence[LayerVector], norms: Mapping[int, float], progress: Progress
) -> SteeringArtifact:
    model.check_same()
    hashes = {keys.WEIGHTS_HASH: model.hash_weights(progress), keys.TOKENIZER_HASH: model.tokenizer_hash}
    return SteeringArtifact(
        model=model.name,
        model_revision=model.revision,
        trait_name=pairs.trait_name,
        method=method,
        hidden_size=model.hidden_size,
        vectors=tuple(vectors),
        precision=model.precision,
        chat_template=model.chat_template,
        metadata={
            **{key: value for key, value in hashes.items() if value is not None},
            keys.PAIRS_HASH: pairs.content_hash,
            "pairs": str(len(pairs)),
            keys.STER_VERSION: _native.__version__,
            keys.TOKEN_RULE: TOKEN_RULE,
            **model.wire,
            **{f"{keys.RESIDUAL_NORM}.{layer}": f"{norm:.6g}" for layer, norm in norms.items()},
        },
    )
