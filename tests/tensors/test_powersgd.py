"""PowerSGD: what is exact, what converges, and what peers agree on."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from moshpit.errors import LayoutError
from moshpit.tensors.powersgd import PowerSGD, orthonormal

SHAPES = [(40, 30), (30,), (), (16, 8, 3, 3), (5,), (2, 2), (0, 7)]
NUMEL = 40 * 30 + 30 + 1 + 16 * 72 + 5 + 4


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Many small products: on a busy machine, threads that wait for each other take most of
    the time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def low_rank(rank: int, seed: int) -> torch.Tensor:
    """A vector whose matrices have this rank, and the same column spaces whatever the seed."""
    parts = [
        (normal(40, rank) @ normal(rank, 30, seed=seed)).flatten(),
        normal(31, seed=seed),
        (normal(16, rank) @ normal(rank, 72, seed=seed)).flatten(),
        normal(9, seed=seed),
    ]
    return torch.cat(parts)


def round_of(peers: list[PowerSGD], vectors: list[torch.Tensor]) -> list[torch.Tensor]:
    """One averaging in a group in which all weigh the same; what each peer takes for the mean."""
    mean_p = torch.stack([p.compress_p(v) for p, v in zip(peers, vectors, strict=True)]).mean(0)
    mean_q = torch.stack([p.compress_q(mean_p) for p in peers]).mean(0)
    return [p.decompress(mean_q) for p in peers]


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).norm() / b.norm())


def test_sizes() -> None:
    power = PowerSGD(SHAPES, rank=3)
    assert power.numel == NUMEL
    assert power.p_numel == 3 * (40 + 16) + 30 + 1 + 5 + 4
    assert power.q_numel == 3 * (30 + 72)


def test_factors_that_would_be_no_smaller_are_not_made() -> None:
    assert PowerSGD([(4, 4)], rank=2).q_numel == 0  # 2·(4+4) = 16 numbers
    assert PowerSGD([(4, 5)], rank=2).q_numel == 10  # 18 of 20


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_matrices_of_no_more_than_its_rank_are_exact(rank: int) -> None:
    peers = [PowerSGD(SHAPES, rank=4) for _ in range(3)]
    vectors = [low_rank(rank, seed) for seed in (11, 12, 13)]
    expected = torch.stack(vectors).mean(0)
    for _ in range(3):  # the columns of Q that vanish for rank < 4 are made anew
        for got in round_of(peers, vectors):
            assert distance(got, expected) < 1e-5
    # What was lost is rounding alone.
    assert all(p.state_dict()["residual"].norm() < 1e-4 * expected.norm() for p in peers)


def test_small_tensors_are_exact_always() -> None:
    peers = [PowerSGD(SHAPES, rank=1) for _ in range(2)]
    vectors = [normal(NUMEL, seed=seed) for seed in (1, 2)]
    expected = torch.stack(vectors).mean(0)
    for _ in range(3):
        for got in round_of(peers, vectors):
            for place in (slice(1200, 1231), slice(NUMEL - 9, NUMEL)):
                assert torch.equal(got[place], expected[place])


def test_without_feedback_it_would_lose_much() -> None:
    """Or the next test would show nothing."""
    peers = [PowerSGD(SHAPES, rank=2) for _ in range(4)]
    vectors = [normal(NUMEL, seed=seed) for seed in range(4)]
    got = round_of(peers, vectors)[0]
    assert distance(got, torch.stack(vectors).mean(0)) > 0.5


def test_with_feedback_the_sum_of_many_rounds_converges() -> None:
    peers = [PowerSGD(SHAPES, rank=2) for _ in range(4)]
    vectors = [normal(NUMEL, seed=seed) for seed in range(4)]
    expected = torch.stack(vectors).mean(0)
    total, errors = torch.zeros(NUMEL), {}
    for number in range(1, 161):
        total += round_of(peers, vectors)[0]
        errors[number] = distance(total / number, expected)
    assert errors[40] < 0.5 * errors[1]
    assert errors[160] < 0.35 * errors[40]


def test_the_residual_is_what_the_mean_lacks() -> None:
    """Whatever was sent: the mean of the residuals is the sum of what is missing."""
    peers = [PowerSGD(SHAPES, rank=2) for _ in range(3)]
    missing = torch.zeros(NUMEL)
    for number in range(5):
        vectors = [normal(NUMEL, seed=10 * number + seed) for seed in range(3)]
        missing += torch.stack(vectors).mean(0) - round_of(peers, vectors)[0]
    mean = torch.stack([p.state_dict()["residual"] for p in peers]).mean(0)
    assert torch.allclose(mean, missing, atol=1e-4)


def test_it_learns_with_error_feedback() -> None:
    """Four peers, each with a quadratic of its own, reach the minimum of the sum."""
    targets = [normal(NUMEL, seed=seed) for seed in range(4)]
    best = torch.stack(targets).mean(0)
    peers = [PowerSGD(SHAPES, rank=2) for _ in targets]
    x = torch.zeros(NUMEL)
    for _ in range(300):
        x = x - 0.1 * round_of(peers, [x - target for target in targets])[0]
    assert distance(x, best) < 0.02


def test_the_factors_follow_the_largest_directions() -> None:
    """The next Q begins where the last one ended, as a power iteration does."""
    spectrum = torch.tensor([10.0, 5.0, *[0.5] * 28])
    left, _ = torch.linalg.qr(normal(40, 30, seed=5))
    right, _ = torch.linalg.qr(normal(30, 30, seed=6))
    matrix = left @ torch.diag(spectrum) @ right.t()
    best = left[:, :2] @ torch.diag(spectrum[:2]) @ right[:, :2].t()
    power = PowerSGD([(40, 30)], rank=2)
    for _ in range(6):
        got = power.decompress(power.compress_q(power.compress_p(matrix.flatten())))
        power.load_state_dict(power.state_dict() | {"residual": torch.zeros(1200)})
    assert distance(got, best.flatten()) < 1e-4


def test_peers_agree_byte_for_byte_given_the_same_means() -> None:
    peers = [PowerSGD(SHAPES, rank=3, schema=b"demo") for _ in range(3)]
    for number in range(4):
        results = round_of(peers, [normal(NUMEL, seed=9 * number + i) for i in range(3)])
        states = [p.state_dict()["q"] for p in peers]
        for other, state in zip(results[1:], states[1:], strict=True):
            assert other.numpy().tobytes() == results[0].numpy().tobytes()
            assert state.numpy().tobytes() == states[0].numpy().tobytes()


def test_the_first_q_comes_from_the_schema() -> None:
    def q(schema: bytes, number: int = 0) -> bytes:
        power = PowerSGD(SHAPES, rank=2, schema=schema)
        power.reseed(number)
        return power.state_dict()["q"].numpy().tobytes()

    assert q(b"a") == q(b"a")
    assert q(b"a") != q(b"b")
    assert q(b"a") != q(b"a", 1)
    assert q(b"a", 7) == q(b"a", 7)
    # Pinned: peers of other versions and machines must make the same.
    first = PowerSGD([(4, 5)], rank=1).state_dict()["q"]
    assert (first * 32768).tolist() == [14020, 5345, 3709, 24708, -28255]


def test_zeros_and_tiny_numbers_do_no_harm() -> None:
    power = PowerSGD([(20, 30)], rank=2)
    for scale in (0.0, 1e-30, 0.0, 1.0):
        vector = scale * torch.outer(normal(20), normal(30)).flatten()
        got = power.decompress(power.compress_q(power.compress_p(vector)))
        assert torch.isfinite(got).all()
        assert torch.allclose(got, vector, rtol=1e-3, atol=1e-5 * scale + 1e-35)
        assert torch.isfinite(power.state_dict()["q"]).all()
        assert (power.state_dict()["q"].view(30, 2).norm(dim=0) > 0.5).all()


def test_a_round_that_came_to_nothing_changes_nothing() -> None:
    peers = [PowerSGD(SHAPES, rank=2) for _ in range(2)]
    for number in range(3):
        vector = normal(NUMEL, seed=number)
        for _ in range(2):  # the second peer begins every round in vain
            peers[1].compress_q(peers[1].compress_p(normal(NUMEL, seed=77)))
            peers[1].abort()
        results = [p.decompress(p.compress_q(p.compress_p(vector))) for p in peers]
        assert torch.equal(*results)
    assert torch.equal(*(p.state_dict()["residual"] for p in peers))


def test_vectors_and_means_are_only_read() -> None:
    power, vector = PowerSGD(SHAPES, rank=2), normal(NUMEL)
    p = power.compress_p(vector)
    mean_p = p.clone()
    q = power.compress_q(mean_p)
    mean_q = q.clone()
    power.decompress(mean_q)
    assert torch.equal(vector, normal(NUMEL))
    assert torch.equal(mean_p, p)
    assert torch.equal(mean_q, q)


def test_states_continue_as_if_nothing_had_happened() -> None:
    one, two = PowerSGD(SHAPES, rank=2), PowerSGD(SHAPES, rank=2)
    one.decompress(one.compress_q(one.compress_p(normal(NUMEL))))
    two.load_state_dict(one.state_dict())
    results = [p.decompress(p.compress_q(p.compress_p(normal(NUMEL, seed=2)))) for p in (one, two)]
    assert torch.equal(*results)


def test_reset_forgets_everything() -> None:
    power = PowerSGD(SHAPES, rank=2)
    power.decompress(power.compress_q(power.compress_p(normal(NUMEL))))
    power.reset()
    for key, value in PowerSGD(SHAPES, rank=2).state_dict().items():
        assert torch.equal(power.state_dict()[key], value)


def test_what_does_not_fit_is_refused() -> None:
    power = PowerSGD(SHAPES, rank=2)
    with pytest.raises(LayoutError, match="vector"):
        power.compress_p(torch.zeros(NUMEL + 1))
    power.compress_p(torch.zeros(NUMEL))
    with pytest.raises(LayoutError, match="mean of P"):
        power.compress_q(torch.zeros(3))
    power.compress_q(torch.zeros(power.p_numel))
    with pytest.raises(LayoutError, match="mean of Q"):
        power.decompress(torch.zeros(3))
    with pytest.raises(LayoutError, match="no q"):
        power.load_state_dict({"residual": torch.zeros(NUMEL)})
    with pytest.raises(LayoutError, match="residual"):
        power.load_state_dict(PowerSGD([(9, 9)], rank=2).state_dict())
    with pytest.raises(LayoutError, match="rank 0"):
        PowerSGD(SHAPES, rank=0)


def test_columns_become_orthonormal() -> None:
    matrix = normal(50, 6)
    matrix[:, 3] = matrix[:, 0] - 2 * matrix[:, 1]
    matrix[:, 5] = matrix[:, 4] + 1e-4 * matrix[:, 5]
    got = orthonormal(matrix)
    assert (got[:, 3] == 0).all()
    expected = torch.eye(6, dtype=torch.float64)
    expected[3, 3] = 0
    assert torch.allclose(got.t() @ got, expected, atol=1e-12)
    back = got @ (got.t() @ matrix.double())
    assert torch.allclose(back, matrix.double(), atol=1e-5)
