from hypothesis import given
from hypothesis import strategies as st

from ster._batches import plan_batches


@given(lengths=st.lists(st.integers(1, 50), max_size=60), budget=st.integers(1, 80))
def test_every_sequence_is_in_one_batch_and_no_batch_is_too_large(lengths: list[int], budget: int) -> None:
    batches = plan_batches(lengths, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(lengths)))
    for batch in batches:
        assert len(batch) == 1 or sum(lengths[index] for index in batch) <= budget
    packed = [lengths[index] for batch in batches for index in batch]
    assert packed == sorted(packed, reverse=True)
