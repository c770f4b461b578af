"""Fine-tuning with LoRA: adapters of peft's in a tiny Llama, on texts made here; what it generates is measured exactly.

A real run begins with a model's folder: `paceline.hf.from_folder("path/of/model")` in the place of the configuration.
"""

import peft
import torch
import transformers

from paceline import Mean, hf

LETTERS = 26
LENGTH = 8
TEXT = (torch.arange(32)[:, None] * 5 + torch.arange(LENGTH) * 3) % LETTERS
"""Each letter is the third after the one before."""


class FineTune(hf.TransformersTask):
    batch_size = 16
    shards = 4
    epochs = 12

    def __init__(self, lr: float = 4e-2, rank: int = 8):
        rows = [{"input_ids": one, "labels": one} for one in TEXT]
        super().__init__(train=rows, evaluate=rows[:10], lr=lr)
        self.rank = rank

    def model(self):
        base = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(
                vocab_size=LETTERS,
                hidden_size=32,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
            )
        )
        adapters = peft.LoraConfig(r=self.rank, target_modules="all-linear", task_type="CAUSAL_LM")
        return peft.get_peft_model(base, adapters)

    def metrics(self, model, batch):
        given, wanted = batch["input_ids"][:, :4], batch["input_ids"][:, 4:]
        made = model.generate(
            input_ids=given, attention_mask=torch.ones_like(given), max_new_tokens=LENGTH - 4, do_sample=False
        )
        return {
            "accuracy": Mean((made[:, 4:] == wanted).sum(), wanted.numel()),
            **super().metrics(model, batch),
        }
