import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.world.fingerprint import CollectiveCall, call_site, describe

words = st.text(st.characters(min_codepoint=32, max_codepoint=126), max_size=20)


@given(words, st.integers(min_value=0, max_value=2**63), words, words)
def test_a_call_survives_the_journey(operation, number, arguments, site):
    call = CollectiveCall(operation, number, arguments, site)
    assert CollectiveCall.decode(call.encode()) == call


def test_the_size_never_depends_on_the_words():
    long = CollectiveCall("x" * 999, 10**30, "y" * 999, "z" * 999)
    assert long.encode().shape == CollectiveCall("a", 1, "", "").encode().shape


def test_describe():
    assert describe(torch.zeros(2, 3)) == "float32[2, 3]"
    assert describe(torch.zeros(2, 3), free_rows=True) == "float32[*, 3]"
    assert describe(torch.tensor(1)) == "int64[]"


def test_the_call_site_is_the_caller_outside_the_room():
    assert call_site().startswith("unit/world/test_fingerprint.py:")
