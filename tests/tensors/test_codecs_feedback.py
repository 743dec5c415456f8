"""Error feedback: the residual moves once a round, whatever happens within it."""

from __future__ import annotations

import pytest
import torch

from moshpit.errors import LayoutError
from moshpit.tensors.codecs import ErrorFeedback, codec_named

INT4, TOPK, FLOAT32 = codec_named("int4"), codec_named("topk"), codec_named("float32")
FIRST, SECOND, BOTH = slice(0, 256), slice(256, 512), slice(0, 512)


def values(seed: int = 1, numel: int = 512) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(seed))


def test_what_was_lost_is_kept() -> None:
    feedback, x = ErrorFeedback(512), values()
    payload = feedback.encode(TOPK, FIRST, x[FIRST])
    assert bytes(payload) == bytes(TOPK.encode(x[FIRST]))
    assert (feedback.residual == 0).all()  # not before the round is over
    feedback.commit()
    assert torch.equal(feedback.residual[FIRST], x[FIRST] - TOPK.decode(payload))
    assert (feedback.residual[SECOND] == 0).all()


def test_what_was_kept_is_sent() -> None:
    feedback, x = ErrorFeedback(512), values()
    feedback.encode(TOPK, BOTH, x)
    feedback.commit()
    kept = feedback.residual.clone()
    assert bytes(feedback.encode(TOPK, BOTH, x)) == bytes(TOPK.encode(x + kept))


def test_sent_again_is_the_same_and_counts_once() -> None:
    once, thrice = ErrorFeedback(512), ErrorFeedback(512)
    for seed in range(4):
        x = values(seed)
        payload = bytes(once.encode(INT4, FIRST, x[FIRST]))
        for _ in range(3):
            assert bytes(thrice.encode(INT4, FIRST, x[FIRST])) == payload
            thrice.encode(INT4, SECOND, x[SECOND])
        once.encode(INT4, SECOND, x[SECOND])
        once.commit()
        thrice.commit()
        assert torch.equal(once.residual, thrice.residual)


def test_the_sum_of_what_was_sent_is_the_sum_of_what_was_meant() -> None:
    feedback = ErrorFeedback(512)
    sent, meant = torch.zeros(512), torch.zeros(512)
    for seed in range(30):
        meant += values(seed)
        sent += TOPK.decode(feedback.encode(TOPK, BOTH, values(seed)))
        feedback.commit()
    assert torch.allclose(sent + feedback.residual, meant, atol=1e-4)


def test_a_round_that_came_to_nothing() -> None:
    feedback, x = ErrorFeedback(512), values()
    feedback.encode(TOPK, BOTH, x)
    feedback.commit()
    before = feedback.residual.clone()
    payload = bytes(feedback.encode(TOPK, BOTH, x))
    feedback.rollback()
    feedback.commit()
    assert torch.equal(feedback.residual, before)
    assert bytes(feedback.encode(TOPK, BOTH, x)) == payload


def test_what_nobody_uses_is_taken_back() -> None:
    feedback, x = ErrorFeedback(512), values()
    feedback.encode(TOPK, BOTH, x)
    feedback.commit()
    feedback.settle()
    before = feedback.residual.clone()
    for place in (FIRST, SECOND):
        feedback.encode(TOPK, place, x[place])
    payload = bytes(feedback.encode(TOPK, FIRST, x[FIRST]))
    feedback.commit(left_out=[SECOND])
    assert not torch.equal(feedback.residual[FIRST], before[FIRST])
    feedback.undo()
    assert torch.equal(feedback.residual, before)
    assert bytes(feedback.encode(TOPK, FIRST, x[FIRST])) == payload
    feedback.rollback()
    feedback.undo()  # what is settled stays
    assert torch.equal(feedback.residual, before)


def test_chunks_that_were_left_out_keep_their_residual() -> None:
    feedback, x = ErrorFeedback(512), values()
    for place in (FIRST, SECOND):
        feedback.encode(TOPK, place, x[place])
    feedback.commit()
    before = feedback.residual.clone()
    for place in (FIRST, SECOND):
        feedback.encode(TOPK, place, x[place])
    feedback.commit(left_out=[FIRST])
    assert torch.equal(feedback.residual[FIRST], before[FIRST])
    assert not torch.equal(feedback.residual[SECOND], before[SECOND])


def test_a_contribution_to_ones_own_part_takes_the_residual_along() -> None:
    feedback, x = ErrorFeedback(512), values()
    feedback.encode(TOPK, BOTH, x)
    feedback.commit()
    kept = feedback.residual.clone()
    assert torch.equal(feedback.exact(FIRST, x[FIRST]), x[FIRST] + kept[FIRST])
    assert torch.equal(feedback.exact(FIRST, x[FIRST]), x[FIRST] + kept[FIRST])
    feedback.commit()
    assert (feedback.residual[FIRST] == 0).all()
    assert torch.equal(feedback.residual[SECOND], kept[SECOND])


def test_what_a_mean_loses_is_the_reducers() -> None:
    """However the masses are, what arrives in the end is what was meant."""
    feedback, others = ErrorFeedback(512), values(2)
    sent, meant = torch.zeros(512), torch.zeros(512)
    for mass in (1.0, 5.0, 2.0, 0.5) * 10:
        feedback.weigh(mass)
        mean = (mass * feedback.exact(BOTH, values()) + 4 * others) / (mass + 4)
        payload = INT4.encode(mean)
        feedback.reduced(BOTH, mean, INT4, payload, mass / (mass + 4))
        feedback.commit()
        sent += (mass + 4) * INT4.decode(payload)
        meant += mass * values() + 4 * others
    assert torch.allclose(sent + mass * feedback.residual, meant, rtol=1e-4, atol=1e-2)


def test_values_may_be_overwritten_before_the_round_is_over() -> None:
    """As results do, where they take the place of the local vector."""
    feedback, x = ErrorFeedback(512), values()
    own = feedback.exact(FIRST, x[FIRST])
    payload = feedback.encode(TOPK, SECOND, x[SECOND])
    before = bytes(payload)
    x.zero_()
    feedback.commit()
    assert torch.equal(own, values()[FIRST])
    assert bytes(payload) == before
    assert torch.equal(feedback.residual[SECOND], values()[SECOND] - TOPK.decode(payload))


def test_a_lossless_codec_loses_nothing() -> None:
    feedback, x = ErrorFeedback(512), values()
    payload = feedback.encode(FLOAT32, FIRST, x[FIRST])
    feedback.encode(FLOAT32, SECOND, x[SECOND])
    assert bytes(payload) == bytes(FLOAT32.encode(x[FIRST]))
    feedback.commit()
    assert (feedback.residual == 0).all()


def test_the_codec_may_change_between_rounds() -> None:
    feedback = ErrorFeedback(512)
    sent, meant = torch.zeros(512), torch.zeros(512)
    for seed, codec in enumerate((TOPK, INT4, FLOAT32)):
        meant += values(seed)
        sent += codec.decode(feedback.encode(codec, BOTH, values(seed)))
        feedback.commit()
    assert torch.allclose(sent, meant, atol=1e-5)


def test_numbers_that_saturate_for_ever_stay_finite() -> None:
    feedback, half = ErrorFeedback(4), codec_named("float16")
    x = torch.full((4,), torch.finfo(torch.float32).max)
    for _ in range(3):
        got = half.decode(feedback.encode(half, slice(0, 4), x))
        assert (got == 65504).all()
        feedback.commit()
    assert torch.isfinite(feedback.residual).all()


def test_values_that_are_not_finite_are_refused_and_change_nothing() -> None:
    feedback, x = ErrorFeedback(512), values()
    feedback.encode(TOPK, BOTH, x)
    feedback.commit()
    before = feedback.residual.clone()
    for bad in (float("nan"), float("inf")):
        poisoned = x.clone()
        poisoned[7] = bad
        with pytest.raises(ValueError, match="finite"):
            feedback.encode(TOPK, BOTH, poisoned)
        with pytest.raises(ValueError, match="finite"):
            feedback.exact(BOTH, poisoned)
        feedback.commit()
        assert torch.equal(feedback.residual, before)


def test_states_continue_as_if_nothing_had_happened() -> None:
    feedback, other = ErrorFeedback(512), ErrorFeedback(512)
    feedback.encode(TOPK, BOTH, values(1))
    feedback.commit()
    state = feedback.state_dict()
    expected = bytes(feedback.encode(TOPK, BOTH, values(2)))
    feedback.commit()
    other.encode(TOPK, BOTH, values(3))
    other.load_state_dict(state)
    other.commit()  # the round that was under way is forgotten
    assert bytes(other.encode(TOPK, BOTH, values(2))) == expected


def test_a_state_of_another_vector_is_refused() -> None:
    for state in ({}, {"residual": torch.zeros(511)}):
        with pytest.raises(LayoutError, match="512"):
            ErrorFeedback(512).load_state_dict(state)


def test_reset_forgets_everything() -> None:
    feedback = ErrorFeedback(512)
    feedback.encode(TOPK, BOTH, values())
    feedback.commit()
    feedback.encode(TOPK, BOTH, values())
    feedback.reset()
    feedback.commit()
    assert (feedback.residual == 0).all()
