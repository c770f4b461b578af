"""`paceline.train`, `resume` and `load`: the bits of the command, and its refusals as exceptions."""

import gc
import json

import pytest

import paceline
from paceline.checkpoint import weights_sha256
from paceline.cli.application import app
from tests.dist.launch.lines import Lines, Stubborn


def command(capfd, *arguments):
    """What `paceline train ... --json` prints."""
    status = app(args=["train", *arguments, "--json"], standalone_mode=False)
    assert not status
    return json.loads(capfd.readouterr().out.splitlines()[-1])


def sha(model):
    return weights_sha256(dict(model.state_dict()))


def test_a_call_gives_what_the_command_gives(tmp_path, capfd):
    options = {"threads": 1, "progress": False}
    typed = command(
        capfd,
        f"{Lines.__module__}:Lines",
        *f"--set lr=0.05 --workers 1 --epochs 2 --threads 1 --out {tmp_path / 'typed'}".split(),
    )
    out = tmp_path / "called"
    called = paceline.train(
        Lines, settings={"lr": 0.05}, workers=2, epochs=2, out=out, save_every=4, **options
    )
    same = ("steps", "samples", "shards", "exactness", "loss", "metrics", "weights_sha256")
    assert {name: getattr(called, name) for name in same} == {name: typed[name] for name in same}
    assert called.out == out
    assert (called.workers, called.restarts, called.recoveries) == (2, 0, ())
    assert list(called.history.loss) == [*range(1, 9)]
    assert called.history.loss[8] == called.loss
    assert [*called.history.metrics] == [4, 8]
    assert called.history.metrics[8] == called.metrics
    assert "loss" in repr(called)
    assert "<table>" in called._repr_html_()
    assert capfd.readouterr().out == ""

    # The command's run goes on in Python, with its task and options; an object gives the same bits as its class.
    resumed = paceline.resume(tmp_path / "typed", steps=10, strategy="fsdp", workers=2, **options)
    straight = paceline.train(Lines(lr=0.05), steps=10, **options)
    assert resumed.weights_sha256 == straight.weights_sha256
    assert list(resumed.history.loss) == [*range(1, 11)]
    assert [*resumed.history.loss.values()] == [*straight.history.loss.values()]

    # Weights, whatever saved them.
    loaded = paceline.load(tmp_path / "typed")
    assert sha(loaded) == resumed.weights_sha256 == sha(straight.model())
    assert not loaded.training
    assert sha(paceline.load(tmp_path / "typed", step=8)) == called.weights_sha256
    assert sha(paceline.load(out / "checkpoints" / "step-8", task=Lines())) == called.weights_sha256
    with pytest.raises(paceline.InputError, match=r"there is no checkpoint at .*step-3.* of steps 4, 8\."):
        paceline.load(out, step=3)
    with pytest.raises(paceline.InputError, match=r"are not those of the model .*size mismatch"):
        paceline.load(out, settings={"width": 5})

    # A temporary folder goes with the result.
    place = straight.out
    assert place.is_dir()
    del straight
    gc.collect()  # what holds it may be a ring by now
    assert not place.exists()


def test_what_goes_wrong_is_an_exception(tmp_path, capfd):
    out = tmp_path / "failed"
    with pytest.raises(paceline.WorkerFailedError, match="rank 0 on") as caught:
        paceline.train(Stubborn, steps=1, threads=1, out=out)
    assert "will not" in caught.value.__notes__[0]
    assert (
        "Stubborn" in capfd.readouterr().err
    )  # the progress of the command; the error is in the exception alone
    for call, words in (
        (lambda: paceline.train(Lines, out=out), r"holds a run|saved no checkpoint"),
        (lambda: paceline.resume(tmp_path / "none"), r"there is no run in .*none\. Start one with"),
        (lambda: paceline.resume(out, out=out), "out is no option of resume"),
        (lambda: paceline.load(tmp_path), "holds no checkpoint that can be read"),
        (lambda: paceline.load(out, step="8"), "step is '8', but must be a whole number"),
        (lambda: paceline.load(out, step=10**400), "step is a number of 401 digits"),
        (lambda: paceline.load(out, average="no"), "average is 'no', but must be True, False or None"),  # type: ignore[arg-type]
        (lambda: paceline.verify(Lines, strategy=None), "strategy is None, but must be text"),
        (lambda: paceline.train(Lines, worker=2), "unknown option 'worker'. Did you mean 'workers'"),
        (lambda: paceline.train(Lines, steps=1, epochs=1), "^epochs= and steps= both say when to end"),
        (lambda: paceline.train(Lines, hosts="a,b"), "hosts is no option of train"),
        (lambda: paceline.train(Lines, workers=9), "Use workers=4 or fewer, or shards=9 or more"),
        (lambda: paceline.train(Lines, settings={"lx": 1}), "Did you mean 'lr'"),
        (lambda: paceline.verify(Lines, worker=2), "Did you mean 'workers'"),
        (lambda: paceline.verify(Lines, out="x"), "out is no option of verify"),
        (lambda: paceline.verify(Lines, hash_seed=3), "^hash_seed is 3, but must be True or False"),  # type: ignore[arg-type]
        (lambda: paceline.train(None), "^there is no task to train"),
    ):
        with pytest.raises(paceline.InputError, match=words) as caught:
            call()
        assert "--" not in str(caught.value)
