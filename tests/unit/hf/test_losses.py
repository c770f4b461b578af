"""A loss is an exact sum and what it is of; what cannot be put together of parts is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline import hf
from paceline.errors import InputError, UnknownNameError

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")

from tests.dist.hf.tasks import BERT, WIDTH, make, padded, texts  # noqa: E402  (it imports transformers)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def classes(items: list[dict[str, torch.Tensor]], labels: Any) -> list[dict[str, torch.Tensor]]:
    return [{**one, "labels": torch.as_tensor(label)} for one, label in zip(items, labels, strict=False)]


def classifier(**config: Any) -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**{**BERT.to_dict(), **config}))


CASES = {
    "causal": (lambda: make("llama"), texts()),
    "gpt2": (lambda: make("gpt2"), texts()),
    "masked": (lambda: make("bert"), texts()),
    "seq2seq": (lambda: make("t5"), texts()),
    "classes": (classifier, classes(texts(), [0, 1, 2, -100, 1])),
    "several classes": (classifier, classes(texts(), torch.eye(3))),
    "numbers": (lambda: classifier(num_labels=1), classes(texts(), [0.5, -1.0, 2.0])),
}


@pytest.mark.parametrize("case", CASES)
def test_the_parts_of_a_batch_add_up_to_the_models_own_mean(case: str) -> None:
    made, items = CASES[case]
    torch.manual_seed(0)
    model = made().eval()
    own = float(model(**padded(items)).loss.detach())
    # Parts of unequal weight: a mean of their means would be another number.
    parts = [hf.loss(model, padded(part)) for part in (items[:1], items[1:])]
    totals, weights = [float(one.total.detach()) for one in parts], [float(one.weight) for one in parts]
    assert sum(totals) / sum(weights) == pytest.approx(own, rel=2e-6)
    means = [total / weight for total, weight in zip(totals, weights, strict=True)]
    assert abs(sum(means) / 2 - own) > 1e-5 * own
    parts[1].total.backward()
    assert any(one.grad is not None for one in model.parameters())


class Smoothed(transformers.LlamaForCausalLM):  # type: ignore[misc]
    """A model whose loss is not the mean over its labels."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        made = super().forward(*args, **kwargs)
        if made.loss is not None:
            made.loss = 0.9 * made.loss + 0.1
        return made


def test_what_cannot_be_known_is_refused() -> None:
    batch, model = padded(texts()), make("llama")
    experts = {"num_local_experts": 2, "intermediate_size": 16, "num_key_value_heads": 2}
    for other, given, words in (
        (Smoothed(model.config), batch, r"Smoothed makes its loss otherwise .*Loss\(total, weight\)"),
        (model, {"input_ids": batch["input_ids"]}, "holds no labels, only input_ids"),
        (model, {**batch, "num_items_in_batch": 7}, "num_items_in_batch"),
        (model, [batch], "was given a list"),
        (
            transformers.BertForQuestionAnswering(BERT),
            batch,
            "does not know over what BertForQuestionAnswering",
        ),
        (
            transformers.MixtralForCausalLM(
                transformers.MixtralConfig(**WIDTH, **experts, output_router_logits=True)
            ),
            batch,
            "adds a loss of its experts",
        ),
    ):
        with pytest.raises(InputError, match=words):
            hf.loss(other, given)  # type: ignore[arg-type]
    with pytest.raises(UnknownNameError, match="causal"):
        hf.loss(model, batch, kind="casual")


def test_a_batch_in_which_nothing_counts_weighs_nothing() -> None:
    batch, model = padded(texts()), make("llama")
    found = hf.loss(model, {**batch, "labels": torch.full_like(batch["labels"], -100)})
    assert (float(found.total.detach()), int(found.weight)) == (0.0, 0)


def test_weights_that_do_not_fit_are_named(tmp_path: Any) -> None:
    make("bert").save_pretrained(tmp_path)
    auto = transformers.AutoModelForSequenceClassification
    with pytest.raises(
        InputError, match=r"has no bert\.pooler.* and holds .* no place for: cls\.predictions"
    ):
        hf.from_folder(tmp_path, auto=auto)
    hf.from_folder(tmp_path, auto=auto, fresh=["bert.pooler.*", "classifier.*"], unused=["cls.*"])
    with pytest.raises(InputError, match="has the shape"):
        hf.load_weights(
            transformers.BertForMaskedLM(transformers.BertConfig(**{**BERT.to_dict(), "vocab_size": 7})),
            tmp_path,
        )
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(InputError, match="no whole safetensors file"):
        hf.from_folder(tmp_path)
