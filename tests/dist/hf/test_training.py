"""transformers' models under every strategy: the bits of one process, and what it saves loads with `from_pretrained`."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import paceline
from paceline import hf
from paceline.errors import InputError
from paceline.strategies.pipeline.stages import chain_of
from paceline.training import trainer
from paceline.training.spec import TrainSpec
from paceline.world import seeds

transformers = pytest.importorskip("transformers", reason="the extra hf is not installed")
pytest.importorskip("peft", reason="the extra hf is not installed")

from tests.dist.hf import tasks  # noqa: E402  (it imports transformers)

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
JOBS: dict[str, dict[str, str]] = {
    "llama": {"kind": "llama"},
    "llama, recomputed": {"kind": "llama", "recomputes": "true", "generates": "false"},
    "gpt2": {"kind": "gpt2"},
    "bert": {"kind": "bert", "generates": "false"},
    "classifier": {"kind": "classifier", "generates": "false"},
    "t5": {"kind": "t5", "generates": "false"},
    "lora": {"kind": "lora"},
    "plain": {"kind": "plain", "generates": "false"},
    "untied": {"kind": "untied", "generates": "false", "recomputes": "true"},
    "untied gpt2": {"kind": "untied gpt2", "generates": "false"},
}
STEPS = 4
"""The third is the short one at the end of an epoch."""


def work(run: paceline.Run, jobs: Mapping[str, dict[str, str]], out: str | None) -> dict[str, Any]:
    """Train every job in a run of its own."""
    warnings.simplefilter("ignore")
    made = {}
    for name, settings in jobs.items():
        folder = None if out is None else Path(out) / name.replace(", ", "-")
        own = paceline.Run(run.world, replace(run._engine.state.options, out=folder))
        batch = 14 if name == "plain" else None
        spec = TrainSpec(
            task="tests.dist.hf.tasks:Tuned",
            name="Tuned",
            steps=STEPS,
            batch_size=batch,
            settings=settings,
        )
        result = trainer.main(own, spec)
        replica = own._engine.state.replica
        weights = {key: tensor.clone() for key, tensor in replica.state()["model"].items()}
        made[name] = result["weights_sha256"], result["loss"], result["metrics"], weights, list(replica.notes)
    return made


def launch(jobs: Mapping[str, dict[str, str]], out: Path | None = None, **asked: Any) -> dict[str, Any]:
    told = None if out is None else str(out)
    return paceline.launch(work, jobs, told, shards=4, threads=1, device="cpu", **asked)[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def alone() -> dict[str, Any]:
    return launch(JOBS, strategy="single")


def chosen(*names: str) -> dict[str, dict[str, str]]:
    return {name: JOBS[name] for name in names}


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What two workers made that shard everything, and where they saved it."""
    out = tmp_path_factory.mktemp("runs")
    return launch(JOBS, out, strategy="fsdp", workers=2), out


def test_the_bits_of_one_process_with_nobody_holding_the_model(
    alone: dict[str, Any], sharded: tuple[dict[str, Any], Path]
) -> None:
    for name, found in sharded[0].items():
        assert found[:3] == alone[name][:3], name
        # What adapters do to a model in its making cannot be recorded, and is said.
        assert [bool(text) for text in found[4]] == [True] * (name == "lora")


@pytest.mark.parametrize(
    ("names", "asked"),
    [
        (("llama", "lora"), {"strategy": "ddp", "workers": 2}),
        (("t5", "lora"), {"strategy": "ps", "workers": 3}),
    ],
    ids=["ddp", "ps"],
)
def test_the_bits_of_one_process(
    names: tuple[str, ...], asked: dict[str, Any], alone: dict[str, Any]
) -> None:
    for name, found in launch(chosen(*names), **asked).items():
        assert found[:3] == alone[name][:3], name


def test_a_pipeline_of_decoders_with_padding_has_the_bits_of_one_process(
    alone: dict[str, Any], tmp_path: Path
) -> None:
    """Whether a batch is padded decides which mask a model makes: its values are looked at."""
    made = launch(chosen("untied", "untied gpt2"), tmp_path / "runs", strategy="pp", workers=2)
    for name, found in made.items():
        assert found[:2] == alone[name][:2], name
    folder = hf.save_pretrained(
        tmp_path / "runs" / "untied", tmp_path / "saved", model=partial(tasks.make, "untied")
    )
    loaded = transformers.LlamaForCausalLM.from_pretrained(folder)
    assert all(torch.equal(value, alone["untied"][3][key]) for key, value in loaded.state_dict().items())


def test_a_pipeline_names_the_weights_that_its_first_and_last_stage_share() -> None:
    batch = tasks.padded(tasks.texts(4))
    chain = chain_of(tasks.make("gpt2"), None, (), {**batch, "use_cache": False})
    with pytest.raises(InputError, match=r"share transformer\.wte\.weight and lm_head\.weight"):
        chain.places(chain.cut(2))


def test_split_layers_of_gpt2_and_t5_add_up_to_the_whole(alone: dict[str, Any]) -> None:
    """Sums over at most 128 terms in two parts, and AdamW, which moves a weight by lr whatever its gradient's size."""
    for name, found in launch(chosen("gpt2", "t5"), strategy="tp", workers=2).items():
        assert found[1] == pytest.approx(alone[name][1], rel=1e-5)
        for key, value in found[3].items():
            same = torch.ones_like(value, dtype=torch.bool)
            if key.endswith("attn.c_attn.bias"):
                # A softmax does not feel what is added to all keys: its gradient is rounding alone, and AdamW makes steps of it.
                same[len(value) // 3 : 2 * len(value) // 3] = False
            torch.testing.assert_close(value[same], alone[name][3][key][same], atol=STEPS * 3e-6, rtol=1e-4)


def test_one_step_is_that_of_a_loop_over_the_tokens(alone: dict[str, Any]) -> None:
    """One batch of everything, weighed by hand: the same weights but for rounding."""
    task = tasks.Tuned("plain", generates=False)
    seeds.seed_everything(seeds.derive(task.seed, "model"))
    model = task.model()
    optimizer = task.optimizer(model)
    batch = tasks.padded(tasks.texts())
    for _ in range(STEPS):
        scores = model(batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
        targets = batch["labels"][:, 1:]
        each = torch.nn.functional.cross_entropy(scores.transpose(1, 2), targets, reduction="none")
        mean = each[targets != -100].sum() / (targets != -100).sum()
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
    assert alone["plain"][1] == pytest.approx(float(mean.detach()), rel=1e-5)
    for name, value in model.state_dict().items():
        # AdamW moves a weight by about lr in each step, whatever the size of its gradient: 1e-3 of that.
        torch.testing.assert_close(alone["plain"][3][name], value, atol=STEPS * 3e-6, rtol=1e-5)


@pytest.mark.parametrize("name", ["llama", "t5", "classifier"])
def test_from_pretrained_loads_what_is_saved(
    name: str, sharded: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    made, out = sharded
    folder = hf.save_pretrained(out / name, tmp_path / name, model=partial(tasks.make, name))
    kind = type(tasks.make(name))
    model, report = kind.from_pretrained(folder, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    weights = made[name][3]
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())
    # And so does a task that begins with them: every worker reads what it holds.
    again = hf.from_folder(folder)
    assert type(again) is kind
    assert all(torch.equal(value, weights[key]) for key, value in again.state_dict().items())
    with pytest.raises(InputError, match="not empty"):
        hf.save_pretrained(out / name, folder, model=partial(tasks.make, name))


def test_a_sharded_run_begins_with_weights_that_nobody_holds_whole(
    alone: dict[str, Any], sharded: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    folder = hf.save_pretrained(
        sharded[1] / "llama", tmp_path / "llama", model=tasks.make("llama"), max_shard_size="20KB"
    )
    assert (folder / "model.safetensors.index.json").exists()
    job = {"begun": {"start": str(folder), "generates": "false"}}
    (one,), (two,) = launch(job, strategy="single").values(), launch(job, strategy="fsdp", workers=2).values()
    assert one[:3] == two[:3]
    assert two[4] == [], "the whole model was never made"
    assert one[0] != alone["llama"][0]


def test_of_adapters_they_alone_are_saved_or_the_merged_model(
    sharded: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    import peft

    made, out = sharded
    folder = hf.save_pretrained(out / "lora", tmp_path / "adapter", model=tasks.make("lora"))
    names = {path.name for path in folder.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors"} <= names
    assert "model.safetensors" not in names
    trained = tasks.make("lora")
    trained.load_state_dict(made["lora"][3])
    base = trained.get_base_model().state_dict()
    plain = tasks.make("llama")
    plain.load_state_dict(
        {key.replace("base_layer.", ""): one for key, one in base.items() if "lora" not in key}
    )
    ids = tasks.padded(tasks.texts())["input_ids"]
    with torch.no_grad():
        before = plain.eval()(ids).logits
        loaded = peft.PeftModel.from_pretrained(plain, folder)
        wanted = trained.eval()(ids).logits
        assert torch.equal(loaded.eval()(ids).logits, wanted)
        whole = hf.save_pretrained(out / "lora", tmp_path / "merged", model=tasks.make("lora"), merge=True)
        merged = transformers.LlamaForCausalLM.from_pretrained(whole)
        torch.testing.assert_close(merged.eval()(ids).logits, wanted, atol=1e-5, rtol=1e-4)
    assert not torch.equal(wanted, before)
