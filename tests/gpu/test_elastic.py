"""Workers that share one GPU and lose one of them: gloo carries their CUDA tensors, and the bits stay."""

import pytest
import torch

import paceline
from tests.fault.survivors import train

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_killed_worker_on_a_gpu_changes_nothing(precision, tmp_path):
    options = {"shards": 6, "device": "cuda", "precision": precision}
    (quiet,) = paceline.launch(train, str(tmp_path), strategy="single", **options)
    faults = [("backward", 4, 1, "kill"), ("reduction", 9, 0, "kill"), ("optimizer", 14, 2, "kill")]
    results = paceline.launch(
        train, str(tmp_path), faults, workers=3, backend="gloo", out=tmp_path / "run", **options
    )
    assert {result["weights"] for result in results} == {quiet["weights"]}
    reasons = [change["reason"] for change in results[0]["recoveries"]]
    assert sum("was killed by SIGKILL" in reason for reason in reasons) == len(faults)
