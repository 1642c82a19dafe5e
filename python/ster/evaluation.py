"""How good an artifact is on a set of pairs: what it separates as a probe, and what it does to the model as a steering vector.

As a probe, per layer: accuracy, margin and AUROC of the pairs' last-token activations along the vector, with intervals (see `ster.scores`).

As a steering vector, per strength, with all chosen layers steered at every row:
- gain of a side: how much its log-probability rises, in nats, against the unsteered model. The log-probability of a side is the sum over
  the tokens that come after the longest common prefix of the two sides' token ids (see `ster.likelihood.side_likelihoods`);
- `share`: the pairs whose positive side gains more than the negative side, a pair that does not move counting half; 0.5 is what a
  vector without effect on the trait reaches;
- `mean_shift`: mean over pairs of (gain of the positive side - gain of the negative side); `mean_shift_per_token` the same with each gain
  divided by the side's tokens. Where the two have different signs, the sum measures length: damage costs every token, so longer sides lose;
- `mean_kl`: mean over the tokens of neutral texts of KL(unsteered || steered) between next-token distributions, nats;
- `perplexity_ratio`: steered perplexity of the same texts over the unsteered one.

Neutral texts run as raw text, without the chat template.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import resources
from typing import Any

import numpy as np

from ster.abstract_model import AbstractModel
from ster.artifacts import SCHEMA_VERSION
from ster.errors import InputError
from ster.layers import Layers, parse_layers
from ster.likelihood import Damage, SideLikelihoods, Variant
from ster.pairs_lint import groups
from ster.progress import Progress, reporter
from ster.prompts import check_prompts
from ster.scores import Interval, Score, group_means, mean_interval, score, wilson
from ster.sides import Pairs, PairTokens, as_pair_set, pair_activations, pair_tokens, residual_norms
from ster.steering import Steering, Units, check_units, norm
from ster.steering_artifact import PAIRS_HASH, SteeringArtifact

MAX_KL = 0.5
MUCH = 0.6
"""Steering of more mean residual norms than this, added up over layers, is worth a note: past it texts tend to break."""


@dataclass(frozen=True)
class LayerReport:
    """One layer's vector as a probe.

    train_accuracy, train_margin: what the artifact says of its training pairs. residual_norm: mean length of the rows read here.
    """

    layer: int
    score: Score
    train_accuracy: float | None
    train_margin: float | None
    vector_norm: float
    residual_norm: float

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        rest = {key: value for key, value in asdict(self).items() if key not in ("layer", "score")}
        return {"layer": self.layer, **self.score.to_dict(), **rest}


@dataclass(frozen=True)
class StrengthReport:
    """One strength; the figures are those of the module's head. multipliers: layer -> what its vector is multiplied by.

    mean_kl, within_max_kl: None over a server, which does not tell whole distributions.
    """

    strength: float
    multipliers: dict[int, float]
    share: float
    share_interval: Interval
    mean_shift: float
    mean_shift_interval: Interval | None
    mean_shift_per_token: float
    mean_kl: float | None
    perplexity_ratio: float
    within_max_kl: bool | None
    picked: bool = False

    def to_dict(self) -> dict[str, Any]:
        """For JSON, which has no word for infinity: null."""
        ratio = self.perplexity_ratio if math.isfinite(self.perplexity_ratio) else None
        return {**asdict(self), "multipliers": {str(layer): value for layer, value in self.multipliers.items()}, "perplexity_ratio": ratio}


@dataclass(frozen=True)
class Neutral:
    """The texts damage is measured on. source: "bundled", or the caller's. perplexity: the unsteered model's."""

    source: str
    texts: int
    tokens: int
    perplexity: float


@dataclass(frozen=True)
class EvaluationReport:
    """picked: the strength with the largest share whose `mean_kl` is at most `max_kl`, or None. Of equal shares the one with the largest
    mean shift is picked; of equal shifts, the one given first.

    notes: reasons for caution, one sentence each. neutral and picked are None when no strengths were asked for.
    """

    model: str
    trait_name: str | None
    method: str
    pairs: int
    layers: tuple[LayerReport, ...]
    strengths: tuple[StrengthReport, ...]
    picked: float | None
    units: Units
    max_kl: float
    neutral: Neutral | None
    notes: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        head = {key: getattr(self, key) for key in ("model", "trait_name", "method", "pairs")}
        return {
            "schema_version": SCHEMA_VERSION,
            **head,
            "layers": [layer.to_dict() for layer in self.layers],
            "units": self.units,
            "max_kl": self.max_kl,
            "neutral": None if self.neutral is None else asdict(self.neutral),
            "strengths": [row.to_dict() for row in self.strengths],
            "picked": self.picked,
            "notes": list(self.notes),
        }


def evaluate(
    model: AbstractModel,
    pairs: Pairs,
    artifact: SteeringArtifact,
    strengths: Sequence[float] | None = None,
    *,
    layers: Layers | None = None,
    neutral: Sequence[str] | None = None,
    max_kl: float = MAX_KL,
    units: Units = "absolute",
    progress: Progress = None,
) -> EvaluationReport:
    """Fresh figures for `artifact` on `pairs`; with `strengths`, what it does to the model.

    Args:
        layers: those of the artifact's layers that are scored and steered; None: all of them, together.
        neutral: texts to measure damage on; None: the twenty plain sentences that come with Ster.
        units: `absolute`: the vectors times the strength. `norm`: each vector, scaled to length 1, times the strength times the mean length
            of its layer's residual rows (as the artifact recorded in training; of these pairs, where it did not).

    Raises:
        ArtifactError, LayerError: an artifact for another model (see `Model.check_artifact`), or without a layer asked for.
        InputError: pairs, strengths or texts that cannot be used; all of it before the first pass.
    """
    if not isinstance(artifact, SteeringArtifact):
        swapped = isinstance(pairs, SteeringArtifact)
        found_instead = "the pairs and the artifact, swapped" if swapped else type(artifact).__name__
        raise InputError(
            f"evaluate takes a model, pairs and a SteeringArtifact, found {found_instead}", "ster.evaluate(model, pairs, artifact)"
        )
    pair_set = as_pair_set(pairs)
    wanted = _check_strengths(strengths)
    if not max_kl > 0.0:
        raise InputError(f"max_kl must be more than 0, found {max_kl:g}")
    check_units(units)
    chosen = artifact if layers is None else artifact.only(parse_layers(layers, model.layer_count))
    model.check_artifact(artifact, progress=progress)
    tokens = pair_tokens(model, pair_set)
    texts = [model.encode(text) for text in (check_prompts(neutral) if neutral is not None else bundled_neutral())] if wanted else []
    if wanted and all(len(ids) < 2 for ids in texts):
        raise InputError("neutral texts must have two tokens or more: none has a next token to predict")
    positive, negative = pair_activations(model, tokens, chosen.layers, progress=progress)
    norms = residual_norms(positive, negative)
    together = groups(pair_set)
    rows = tuple(
        LayerReport(
            v.layer, score(positive[:, i], negative[:, i], v.values, together), v.train_accuracy, v.train_margin, norm(v.values), norms[i]
        )
        for i, v in enumerate(chosen.vectors)
    )
    notes = []
    if artifact.metadata.get(PAIRS_HASH) == pair_set.content_hash:
        notes.append("these are the pairs the artifact was trained on: its figures here are training figures")
    reports: tuple[StrengthReport, ...] = ()
    found = None
    if wanted:
        yardstick = dict(zip(chosen.layers, norms, strict=True))
        plans = [chosen.at(strength=strength, units=units, norms=yardstick) for strength in wanted]
        variants: list[Variant] = [("", [])]
        variants += [(f" at strength {strength:g}", plan.edits()) for strength, plan in zip(wanted, plans, strict=True)]
        likelihoods, found = _measure(model, tokens, texts, variants, progress)
        reports = _reports(wanted, plans, likelihoods, found, max_kl, together)
        notes += _cautions(reports, max_kl)
        sums = [residual_sum(chosen, strength, units, yardstick) or 0.0 for strength in wanted]
        much = [f"{strength:g}" for strength, total in zip(wanted, sums, strict=True) if total > MUCH]
        if much and len(chosen.vectors) > 1:
            notes.append(
                f"strength {', '.join(much)}: over {len(chosen.vectors)} layers that adds up to more than {MUCH:g} residual norms (at most"
                f" {max(sums):.3g}); 0.1 to 0.3 at one layer is where to start"
            )
        if units == "norm" and None in map(chosen.residual_norm, chosen.layers):
            notes.append("the artifact does not record residual norms: the unit is the mean norm of these pairs")
        notes += _unknown_words(model, texts)
    return EvaluationReport(
        model=model.name,
        trait_name=artifact.trait_name,
        method=artifact.method,
        pairs=len(pair_set),
        layers=rows,
        strengths=reports,
        picked=next((row.strength for row in reports if row.picked), None),
        units=units,
        max_kl=max_kl,
        neutral=Neutral("bundled" if neutral is None else "given", len(texts), found.rows, found.perplexity) if found else None,
        notes=tuple(notes),
    )


def residual_sum(
    artifact: SteeringArtifact, strength: float, units: Units = "absolute", norms: Mapping[int, float] | None = None
) -> float | None:
    """How much steering is in `artifact.at(strength=strength, units=units)`: the length added at each layer in units of the layer's mean
    residual norm, summed over the layers. None when those norms are neither in the artifact nor in `norms`.
    """
    if units == "norm":
        return abs(strength) * len(artifact.vectors)
    total = 0.0
    for vector in artifact.vectors:
        known = artifact.residual_norm(vector.layer) or (norms or {}).get(vector.layer)
        if not known:
            return None
        total += abs(strength) * norm(vector.values) / known
    return total


def bundled_neutral() -> list[str]:
    """Twenty plain sentences of fact, written for Ster."""
    text = (resources.files("ster") / "data" / "neutral.txt").read_text(encoding="utf-8")
    return text.splitlines()


def _check_strengths(strengths: Sequence[float] | None) -> list[float]:
    found = [float(strength) for strength in (strengths if strengths is not None else ())]
    if strengths is not None and not found:
        raise InputError("at least one strength is required")
    for strength in found:
        if not math.isfinite(strength):
            raise InputError(f"strength must be finite, found {strength:g}")
        if found.count(strength) > 1:
            raise InputError(f"strength {strength:g} is given twice")
    return found


def _measure(
    model: AbstractModel, tokens: Sequence[PairTokens], texts: Sequence[list[int]], variants: Sequence[Variant], progress: Progress
) -> tuple[SideLikelihoods, Damage]:
    """Both measurements under one bar, in texts run."""
    sides, neutral = len(tokens) * len(variants), len(texts) * len(variants)
    with reporter(progress, "steer") as report:
        likelihoods = model.side_likelihoods(tokens, variants, lambda done, _: report(done, sides + neutral))
        return likelihoods, model.damage(texts, variants, lambda done, _: report(sides + done, sides + neutral))


def _reports(
    strengths: Sequence[float],
    plans: Sequence[Steering],
    likelihoods: SideLikelihoods,
    found: Damage,
    max_kl: float,
    together: Sequence[int],
) -> tuple[StrengthReport, ...]:
    """A row per strength; one of them picked, if any keeps the damage small."""
    gains = likelihoods.log_probability[1:] - likelihoods.log_probability[0]  # [strengths, pairs, 2]
    each = gains / np.maximum(likelihoods.tokens, 1)
    rows = []
    for i, strength in enumerate(strengths):
        shifts = gains[i, :, 0] - gains[i, :, 1]
        # A pair that does not move counts as half, so that no effect is a share of 0.5.
        right = np.where(shifts == 0.0, 0.5, shifts > 0.0)
        shares = group_means(right, together)
        rows.append(
            StrengthReport(
                strength=strength,
                multipliers={term.layer: term.strength for term in plans[i].terms},
                share=float(right.mean()),
                share_interval=wilson(float(shares.sum()), len(shares)),
                mean_shift=float(shifts.mean()),
                mean_shift_interval=mean_interval(group_means(shifts, together)),
                mean_shift_per_token=float((each[i, :, 0] - each[i, :, 1]).mean()),
                mean_kl=None if found.kl is None else float(found.kl[i]),
                perplexity_ratio=float(found.perplexity_ratio[i]),
                within_max_kl=None if found.kl is None else bool(found.kl[i] <= max_kl),
            )
        )
    allowed = [row for row in rows if row.within_max_kl and row.mean_shift != 0.0]
    best = max(allowed, key=lambda row: (row.share, row.mean_shift), default=None)
    return tuple(replace(row, picked=row is best) for row in rows)


def _cautions(rows: Sequence[StrengthReport], max_kl: float) -> list[str]:
    """What a reader of the table might miss."""
    notes = []
    best = next((row for row in rows if row.picked), None)
    kls = [(row.mean_kl, row.strength) for row in rows if row.mean_kl is not None]
    if not kls:
        notes.append("the KL is left out and no strength is picked: a server does not tell whole distributions; judge by the perplexity")
    elif best is None and any(row.within_max_kl for row in rows):
        notes.append("no strength within the limit moves these pairs at all")
    elif best is None:
        least, at = min(kls, key=lambda each: each[0])
        notes.append(
            f"no strength keeps the damage within {max_kl:g} nats; the smallest is {least:.3g} at strength {at:g}: try smaller strengths"
        )
    elif best is not None and best.share <= 0.5:
        notes.append("no strength within the limit moves more than half of the pairs towards their positive side")
    if best is not None and best.strength < 0.0:
        notes.append("the picked strength is negative: on these pairs, adding the vector moves the model towards the negative sides")
    if best is not None and best.share > 0.5 >= best.share_interval[0]:
        low, high = best.share_interval
        notes.append(f"the share at the picked strength may be luck: its interval, {low:.2f} to {high:.2f}, holds 0.5, which is no effect")
    lengths = [f"{row.strength:g}" for row in rows if row.mean_shift * row.mean_shift_per_token < 0.0]
    if lengths:
        notes.append(
            f"the sum and the mean per token disagree on the direction of the shift at strength {', '.join(lengths)}:"
            " the sides differ in length, and every token bears the damage"
        )
    return notes


def _unknown_words(model: AbstractModel, texts: Sequence[list[int]]) -> list[str]:
    """A tokenizer of few words reads ordinary sentences as rows of the unknown token."""
    unknown = model.unknown_id
    total = sum(map(len, texts))
    count = sum(ids.count(unknown) for ids in texts) if unknown is not None else 0
    if 2 * count <= total:
        return []
    return [f"{count} of the {total} tokens of the neutral texts are unknown to the tokenizer: give texts it knows (`--neutral FILE`)"]
