import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.errors import InputError
from paceline.tasks.addition import ALPHABET, IGNORED, PADDING, Addition, Problems, decode, encode, write
from tests.unit.tasks.training_loop import train

numbers = st.integers(0, 10**9 - 1)


@given(numbers, numbers)
def test_text_goes_to_tokens_and_back_and_is_true(left, right):
    text = write(left, right)
    assert decode(encode(text)) == text
    question, answer = text.removesuffix(";").split("=")
    assert [int(each[::-1]) for each in (*question.split("+"), answer)] == [left, right, left + right]


def test_an_example():
    assert write(37, 5) == "73+5=24;"


def test_only_the_answer_counts():
    texts = ["73+5=24;", "1+1=2;", "999+999=8991;"]
    tokens, targets = Addition().collate([encode(text) for text in texts])
    assert tokens.shape == targets.shape == (3, 12)
    for text, row, target in zip(texts, tokens, targets, strict=True):
        assert decode(row) == (text if len(text) < 13 else text[:-1])
        assert decode(target[target != IGNORED]) == text.split("=")[1]
        # Each target stands where the token before it is read.
        where = text.index("=")
        assert (target[:where] == IGNORED).all()
        assert target[where] == ALPHABET.index(text[where + 1])


def test_the_weight_is_the_number_of_answer_tokens():
    task = Addition()
    batch = task.collate([encode(write(37, 5)), encode(write(1, 1))])
    assert int(task.loss(task.model(), batch).weight) == len("24;") + len("2;")


@pytest.mark.parametrize("digits", [1, 2, 3, 9])
def test_problems_are_fixed_disjoint_and_of_every_length(digits):
    task = Addition(digits=digits, samples=2000)
    trained, held_out = task.train_data(), task.eval_data()
    assert (len(trained), len(held_out)) == (2000, 1000)
    assert trained.pairs == task.train_data().pairs
    seen, unseen = ({frozenset(pair) for pair in each.pairs} for each in (trained, held_out))
    assert seen
    assert unseen
    assert not seen & unseen
    lengths = {len(str(number)) for pair in trained.pairs for number in pair}
    assert lengths == set(range(1, digits + 1))


def test_the_model_takes_the_longest_problem_and_padding_changes_nothing():
    task = Addition(digits=2)
    model = task.model().eval()
    longest, short = encode(write(99, 99)), encode(write(3, 4))
    together, _ = task.collate([longest, short])
    alone, _ = task.collate([short])
    assert model(together).shape == (2, len(longest) - 1, len(ALPHABET) + 1)
    torch.testing.assert_close(model(together)[1, : alone.shape[1]], model(alone)[0])


def test_the_model_does_not_see_the_future():
    model = Addition().model().eval()
    tokens = encode(write(123, 456)).unsqueeze(0)
    changed = tokens.clone()
    changed[0, 9:] = 7
    assert torch.equal(model(tokens)[0, :9], model(changed)[0, :9])


def test_metrics_count_whole_answers():
    class Knows(torch.nn.Module):
        """Scores the true next token highest, but for the last token of the first problem."""

        def __init__(self, targets):
            super().__init__()
            self.scores = torch.nn.functional.one_hot(targets.clamp(min=0), PADDING + 1).float()
            self.scores[0, (targets[0] != IGNORED).nonzero()[-1], PADDING] = 2.0

        def forward(self, tokens):
            return self.scores

    task = Addition()
    batch = task.collate([encode(write(37, 5)), encode(write(1, 1)), encode(write(999, 1))])
    metrics = task.metrics(Knows(batch[1]), batch)
    assert (int(metrics["accuracy"].total), metrics["accuracy"].weight) == (2, 3)
    assert (int(metrics["token_accuracy"].total), int(metrics["token_accuracy"].weight)) == (9, 10)


def test_some_steps_teach_it_one_digit():
    task = Addition(digits=1, width=32, layers=1, samples=2000)
    model, losses = train(task, steps=80)
    assert losses[0] > 2 > 1.3 > losses[-1]
    with torch.no_grad():
        metrics = task.metrics(model, task.collate(list(Problems(1, 200, held_out=False, seed=3))))
    assert metrics["token_accuracy"].total / metrics["token_accuracy"].weight > 0.5


@pytest.mark.parametrize(
    "wrong", [{"digits": 0}, {"digits": 10}, {"width": 40}, {"width": 0}, {"samples": 0}]
)
def test_impossible_options_are_refused(wrong):
    with pytest.raises(InputError, match=next(iter(wrong))):
        Addition(**wrong)
