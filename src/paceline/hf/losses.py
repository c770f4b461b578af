"""The loss of a transformers model as a sum and its weight, where the model itself gives a mean.

A mean over the tokens that count cannot be put together from the means of parts, so the sum is computed from the model's
scores, by the rule of its class. The first time a model is called it computes its own loss beside, and the two are compared:
a model that makes its loss in another way is refused, instead of being trained on something else.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from paceline.errors import InputError, UnknownNameError
from paceline.hf.library import bare, class_names, transformers
from paceline.task import Loss

IGNORED = -100
CLOSE = {torch.float32: 2e-5, torch.float64: 1e-9}
"""How far a model's own mean may be from sum / weight of the same scores, by their type: some roundings."""
LOOSE = 1e-2
"""The same for scores in 16 bits."""
_FOREIGN = ("num_items_in_batch", "shift_labels")

Rule = Callable[[Any, Tensor, Tensor], Loss]
"""Makes the loss of (configuration, scores, labels)."""


def loss(model: nn.Module, batch: Mapping[str, Any], *, kind: str | None = None) -> Loss:
    """Return the exact sum of a batch's losses and how many labels (or numbers) it is of.

    `kind` is causal, tokens or sequence: how scores and labels belong together, where the class of the model does not say.
    """
    labels = _labels(batch)
    name = _kind(model) if kind is None else kind
    if name not in _RULES:
        raise UnknownNameError("kind of loss", name, _RULES)
    proves = bare(model) not in _proven and not torch.compiler.is_compiling()
    made = model(**_inputs(model, batch, labels, with_labels=proves))
    if getattr(made, "aux_loss", None) is not None:
        raise InputError(
            f"{_name(model)} adds a loss of its experts (output_router_logits), which is a mean over the tokens of one pass and "
            "would depend on how a batch is split. Set output_router_logits=False, or write loss() with paceline.Loss yourself."
        )
    scores = getattr(made, "logits", None)
    if not isinstance(scores, Tensor):
        raise InputError(
            f"{_name(model)} returns no logits, of which the sum of its losses could be made. Write loss() with paceline.Loss."
        )
    found = _RULES[name](bare(model).config, scores, labels)
    if proves and made.loss is not None:
        _prove(model, made.loss, found, scores.dtype)
    return found


_proven: WeakSet[nn.Module] = WeakSet()
"""The models whose own loss was found to be what is computed here."""


def _prove(model: nn.Module, own: Tensor, found: Loss, dtype: torch.dtype) -> None:
    """Raise where a model makes its loss otherwise; a batch in which nothing counts proves nothing."""
    weight = float(found.weight)
    if not weight:
        return
    mine, theirs = float(found.total.detach()) / weight, float(own.detach())
    if abs(mine - theirs) > CLOSE.get(dtype, LOOSE) * max(abs(theirs), 1e-3):
        raise InputError(
            f"{_name(model)} makes its loss otherwise than as a mean over its labels that are not {IGNORED}: {theirs:.6g}, not "
            f"{mine:.6g}. Something is added to it, smoothed or weighed; write loss() with paceline.Loss(total, weight) yourself."
        )
    _proven.add(bare(model))


def _labels(batch: Mapping[str, Any]) -> Tensor:
    if not isinstance(batch, Mapping):
        raise InputError(
            f"paceline.hf.loss was given a {type(batch).__name__}. It takes a mapping of the model's inputs, as transformers' "
            "collators and tokenizers make it: input_ids, attention_mask, labels."
        )
    foreign = next((name for name in _FOREIGN if name in batch), None)
    if foreign is not None:
        raise InputError(
            f"the batch holds {foreign}, which has the model divide or shift in a way of its own. Leave it out: paceline divides "
            "by the weight of the whole global batch."
        )
    labels = batch.get("labels")
    if not isinstance(labels, Tensor):
        raise InputError(
            f"the batch holds no labels, only {', '.join(map(str, batch))}. Use a collator that makes them "
            "(DataCollatorForLanguageModeling, DataCollatorForSeq2Seq), with -100 where nothing is to be learnt."
        )
    return labels


def _inputs(
    model: nn.Module, batch: Mapping[str, Any], labels: Tensor, *, with_labels: bool
) -> dict[str, Any]:
    """Return what the model is called with: without a cache, which is for generation; its own loss only where it is wanted."""
    given = {str(name): value for name, value in batch.items() if name != "labels"}
    if with_labels:
        # Last: under pp the stages before need not know, and count tensors from the front.
        given["labels"] = labels
    inner = bare(model)
    takes = inspect.signature(type(inner).forward).parameters
    if "use_cache" in takes:
        given.setdefault("use_cache", False)
    if not with_labels and "decoder_input_ids" in takes and "decoder_input_ids" not in given:
        given["decoder_input_ids"] = _shifted_right(inner, labels)
    return given


def _shifted_right(model: Any, labels: Tensor) -> Tensor:
    """Return what a decoder is given for its labels, as the model itself would make it."""
    shift = getattr(model, "prepare_decoder_input_ids_from_labels", None)
    if shift is None:
        raise InputError(
            f"{type(model).__name__} does not say how its decoder's inputs are made of labels. Give decoder_input_ids in the "
            "batch: DataCollatorForSeq2Seq does so where it is given the model."
        )
    made: Tensor = shift(labels=labels)
    return made


# The rules.


def _causal(_: Any, scores: Tensor, labels: Tensor) -> Loss:
    """Each token is scored by what stands before it."""
    return Loss.tokens(scores[..., :-1, :].float(), labels[..., 1:], ignore_index=IGNORED)


def _tokens(_: Any, scores: Tensor, labels: Tensor) -> Loss:
    """Each token has scores of its own: masked language models, decoders behind an encoder, tags."""
    return Loss.tokens(scores.float(), labels, ignore_index=IGNORED)


def _sequence(config: Any, scores: Tensor, labels: Tensor) -> Loss:
    """A class, several of them, or numbers for each sample, as the configuration says or its labels show."""
    problem = config.problem_type
    if problem is None:
        whole = labels.dtype in (torch.long, torch.int)
        problem = (
            "regression"
            if config.num_labels == 1
            else f"{'single' if whole else 'multi'}_label_classification"
        )
    if problem == "single_label_classification":
        return Loss.tokens(scores.float(), labels.reshape(-1), ignore_index=IGNORED)
    values, wanted = scores.float().reshape(-1), labels.reshape(-1).float()
    if values.shape != wanted.shape:
        raise InputError(
            f"the model gives {values.numel()} numbers for {wanted.numel()} labels. Set num_labels in its configuration to the "
            "labels that a sample has."
        )
    if problem == "regression":
        return Loss(F.mse_loss(values, wanted, reduction="sum"), values.numel())
    return Loss(F.binary_cross_entropy_with_logits(values, wanted, reduction="sum"), values.numel())


_RULES: dict[str, Rule] = {"causal": _causal, "tokens": _tokens, "sequence": _sequence}
_FAMILIES = {
    # One class may stand in several: encoders with a decoder do among the masked models.
    "SEQ_TO_SEQ_CAUSAL_LM": "tokens",
    "CAUSAL_LM": "causal",
    "MASKED_LM": "tokens",
    "TOKEN_CLASSIFICATION": "tokens",
    "SEQUENCE_CLASSIFICATION": "sequence",
    "IMAGE_CLASSIFICATION": "sequence",
}
"""transformers' own tables of classes."""


def _kind(model: nn.Module) -> str:
    """Return how scores and labels belong together, by the class of the model."""
    tables = transformers().models.auto.modeling_auto
    for name in class_names(model):
        for family, rule in _FAMILIES.items():
            if name in getattr(tables, f"MODEL_FOR_{family}_MAPPING_NAMES").values():
                return rule
    raise InputError(
        f"paceline.hf.loss does not know over what {_name(model)} takes its mean. Say kind='causal', 'tokens' or 'sequence', or "
        "write loss() with paceline.Loss(total, weight)."
    )


def _name(model: nn.Module) -> str:
    return type(bare(model)).__name__
