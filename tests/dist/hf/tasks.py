"""Tiny models of transformers' as tasks; nothing is fetched from anywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from paceline import Mean, hf

VOCABULARY = 61
PAD, END = 0, 2
WIDTH: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "hidden_size": 32,
}
LLAMA = transformers.LlamaConfig(
    **WIDTH,
    intermediate_size=48,
    num_key_value_heads=2,
    max_position_embeddings=32,
    attention_dropout=0.1,
    tie_word_embeddings=True,
    pad_token_id=PAD,
    bos_token_id=1,
    eos_token_id=END,
)
BERT = transformers.BertConfig(**WIDTH, intermediate_size=48, max_position_embeddings=32, num_labels=3)


def make(kind: str) -> nn.Module:
    """Make a model by name."""
    if kind == "llama":
        return transformers.LlamaForCausalLM(LLAMA)
    if kind == "plain":
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**{**LLAMA.to_dict(), "attention_dropout": 0.0})
        )
    if kind == "untied":
        return transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**{**LLAMA.to_dict(), "tie_word_embeddings": False})
        )
    if kind in {"gpt2", "untied gpt2"}:
        small = {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 32}
        return transformers.GPT2LMHeadModel(
            transformers.GPT2Config(
                **small,
                vocab_size=VOCABULARY,
                bos_token_id=1,
                eos_token_id=END,
                tie_word_embeddings=kind == "gpt2",
            )
        )
    if kind == "bert":
        return transformers.BertForMaskedLM(BERT)
    if kind == "classifier":
        return transformers.BertForSequenceClassification(BERT)
    if kind == "t5":
        return transformers.T5ForConditionalGeneration(
            transformers.T5Config(
                vocab_size=VOCABULARY,
                num_layers=2,
                d_model=32,
                d_kv=8,
                d_ff=48,
                num_heads=4,
                decoder_start_token_id=PAD,
            )
        )
    if kind == "lora":
        import peft

        made: nn.Module = peft.get_peft_model(
            transformers.LlamaForCausalLM(LLAMA),
            peft.LoraConfig(
                r=4, lora_dropout=0.1, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
            ),
        )
        return made
    raise AssertionError(kind)


def texts(samples: int = 14) -> list[dict[str, torch.Tensor]]:
    """Make texts of different lengths, in which some tokens are not to be learnt."""
    made = torch.Generator().manual_seed(3)
    found = []
    for number in range(samples):
        ids = torch.randint(3, VOCABULARY, (5 + number % 6,), generator=made)
        labels = ids.where(torch.rand(ids.shape, generator=made) > 0.3, -100)
        found.append({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels})
    return found


def padded(items: Any) -> dict[str, torch.Tensor]:
    """Make a batch of texts."""
    values = {"input_ids": PAD, "attention_mask": 0, "labels": -100}
    if items[0]["labels"].dim() == 0:
        del values["labels"]
    batch = {
        name: pad_sequence([one[name] for one in items], batch_first=True, padding_value=value)
        for name, value in values.items()
    }
    return batch if "labels" in batch else {**batch, "labels": torch.stack([one["labels"] for one in items])}


def generated(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, Mean]:
    """Count the even tokens that a model goes on with."""
    ids = batch["input_ids"][:, :4]
    more = model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=3, do_sample=False
    )
    return {**_loss(model, batch), "even": Mean((more % 2 == 0).sum(), more.numel())}


def _loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, Mean]:
    found = hf.loss(model, batch)
    return {"loss": Mean(found.total, found.weight)}


class Tuned(hf.TransformersTask):
    """A tiny model on texts, measured by what it generates."""

    batch_size = 6
    shards = 4

    def __init__(
        self, kind: str = "llama", generates: bool = True, recomputes: bool = False, start: str = ""
    ) -> None:
        data = texts()
        if kind == "classifier":
            data = [{**one, "labels": torch.tensor(place % 3)} for place, one in enumerate(data)]
        super().__init__(
            train=data, evaluate=data[:5], collate=padded, lr=3e-3, metrics=generated if generates else None
        )
        self._named, self._recomputes, self._start = kind, recomputes, start

    def model(self) -> nn.Module:
        """Make the model, with weights from a folder if one is named."""
        made: Any = hf.from_folder(Path(self._start)) if self._start else make(self._named)
        if self._recomputes:
            made.gradient_checkpointing_enable()
        return made  # type: ignore[no-any-return]
