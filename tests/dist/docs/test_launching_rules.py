"""What docs/launching.md says about the function that is launched holds in the error messages too."""

from __future__ import annotations

import pytest

from paceline.errors import InputError
from paceline.launch.job import FunctionCall


def test_a_function_that_a_worker_cannot_find_is_named_with_what_to_do() -> None:
    call = FunctionCall(module="json", name="late", main_path=None, payload=b"", options={})
    with pytest.raises(InputError, match=r"json has no late above .* Define the function above that call"):
        call.resolve()
