import pytest
import torch

from paceline.errors import InputError, UnknownNameError
from paceline.world.backends import choose_backend, choose_device

CPU = torch.device("cpu")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="says what happens without a GPU")


def test_a_cpu_worker_talks_over_gloo():
    assert choose_device("cpu", 3) == CPU
    assert choose_backend("auto", CPU, 4) == "gloo"
    assert choose_backend("gloo", CPU, 4) == "gloo"


@no_gpu
def test_auto_takes_the_cpu_without_a_gpu():
    assert choose_device("auto", 1) == CPU


@no_gpu
def test_cuda_without_a_gpu_is_refused():
    with pytest.raises(InputError, match="sees no GPU"):
        choose_device("cuda", 0)


def test_nccl_on_the_cpu_is_refused():
    with pytest.raises(InputError, match="--backend gloo"):
        choose_backend("nccl", CPU, 1)


def test_unknown_names_get_the_nearest():
    with pytest.raises(UnknownNameError, match="'gloo'"):
        choose_backend("glo", CPU, 1)
    with pytest.raises(UnknownNameError, match="'cuda'"):
        choose_device("cude", 0)
