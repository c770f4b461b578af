"""What optimizers hold, and how they round."""

import pytest
import torch
from torch import nn

from paceline.errors import InputError
from paceline.strategies.guards.partial_update import Scope, check_step
from paceline.strategies.guards.trained import check_held

CPU = torch.device("cpu")


def test_a_parameter_that_is_listed_twice_is_refused() -> None:
    model = nn.Linear(3, 2)
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = torch.optim.SGD([model.weight, model.bias, model.weight], lr=0.1)
    with pytest.raises(InputError, match=r"a parameter of shape \(2, 3\) twice"):
        check_held(model, optimizer)


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_what_rounds_a_row_by_its_neighbours_is_refused(kind: type[torch.optim.Optimizer]) -> None:
    model = nn.Linear(3, 2)
    check_step(kind(model.parameters(), lr=0.1), Scope.ROWS, CPU)
    with pytest.raises(InputError, match=rf"{kind.__name__}\(fused=True\) rounds"):
        check_step(kind(model.parameters(), lr=0.1, fused=True), Scope.ROWS, CPU)


def test_rows_that_only_rest_in_host_memory_may_be_updated_by_a_fused_step_on_the_device() -> None:
    model = nn.Linear(3, 2)  # where --offload keeps them between two steps
    check_step(torch.optim.AdamW(model.parameters(), fused=True), Scope.ROWS, torch.device("cuda"))
