"""The recommendation is the one that the rule names, and practice's limits hold."""

from __future__ import annotations

import inspect
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import moshpit
from moshpit.errors import ConfigError
from moshpit.planning.codecs import CODECS, codec_named
from moshpit.planning.forecast import Choice, PlannedRun, forecast
from moshpit.planning.recommend import (
    AVERAGINGS_MIN,
    DILOCO_MAX,
    LOCAL_SGD_MAX,
    OVERLAPPED,
    Options,
    allowed,
    cost,
    departure,
    recommend,
)
from moshpit.planning.swarm import swarm_of

MBIT = 1e6 / 8
RUN = PlannedRun(1_300_000_000, 0.8, swarm_of([(24, 200 * MBIT, 200 * MBIT)], 0, 0.05))


@settings(max_examples=20)
@given(
    st.floats(1e5, 1e10),
    st.floats(0.01, 10),
    st.lists(
        st.tuples(st.integers(1, 10), st.floats(10, 1e4), st.floats(10, 1e4)),
        min_size=2,
        max_size=3,
    ),
    st.tuples(st.sampled_from([0.0, 0.35]), st.sampled_from([0.0, 0.02])),
    st.floats(0, 1),
)
def test_the_best_by_the_rule(
    params: float,
    step_s: float,
    classes: list[tuple[int, float, float]],
    prices: tuple[float, float],
    slack: float,
) -> None:
    swarm = swarm_of([(n, up * MBIT, down * MBIT) for n, up, down in classes])
    run = PlannedRun(round(params), step_s, swarm, price_per_hour=prices[0], price_per_gb=prices[1])
    options = Options(slack=slack)
    found = recommend(run, options)
    everything = [forecast(run, choice) for choice in allowed(run, options)]
    least = min(cost(run, one) for one in everything)
    assert cost(run, found.cheapest) == least
    within = [one for one in everything if cost(run, one) <= (1 + slack) * least]
    assert found.best in within
    closest = min(departure(one.choice) for one in within)
    assert departure(found.best.choice) == closest
    assert cost(run, found.best) == min(
        cost(run, one) for one in within if departure(one.choice) == closest
    )


def test_without_slack_the_cheapest_is_taken() -> None:
    found = recommend(RUN, Options(slack=0.0))
    assert cost(RUN, found.best) == cost(RUN, found.cheapest)


def test_money_counts_where_prices_are_known() -> None:
    run = replace(RUN, price_per_gb=1.0)
    assert cost(run, recommend(run).best) == recommend(run).best.money_per_step
    dear, free = recommend(run).best, recommend(RUN).best
    assert dear.swarm_bytes / dear.choice.period < free.swarm_bytes / free.choice.period


def test_on_fast_links_nothing_is_departed_from() -> None:
    run = PlannedRun(1_000_000, 10.0, swarm_of([(8, 1e9, 1e9)]))
    best = recommend(run).best
    assert best.choice.strategy == "GradientAveraging"
    assert (best.choice.period, best.choice.codec.name) == (1, "float32")
    assert departure(best.choice) == 0


def test_only_what_exists_is_offered() -> None:
    choices = allowed(RUN, Options())
    for name in {choice.strategy for choice in choices}:
        can_overlap = "overlap" in inspect.signature(getattr(moshpit, name)).parameters
        assert can_overlap == (name in OVERLAPPED), f"tell the plan what {name} can do"
        offered = {choice.overlap for choice in choices if choice.strategy == name}
        assert offered == ({False, True} if can_overlap else {False})


def test_local_sgd_sends_parameters_so_coarse_codecs_are_out() -> None:
    local = [c for c in allowed(RUN, Options()) if c.strategy == "LocalSGD"]
    assert {choice.codec.name for choice in local} == {"float32", "float16"}
    with pytest.raises(ConfigError, match="float16"):
        allowed(RUN, Options(strategies=("LocalSGD",), codecs=[codec_named("int4")]))


def test_periods_are_those_of_practice_unless_asked_for() -> None:
    choices = allowed(RUN, Options())
    assert max(c.period for c in choices if c.strategy == "LocalSGD") == LOCAL_SGD_MAX
    assert max(c.period for c in choices if c.strategy == "DiLoCo") == DILOCO_MAX
    assert {c.period for c in choices if c.strategy == "GradientAveraging"} == {1}
    asked = allowed(RUN, Options(strategies=("DiLoCo",), periods=(2000, 3)))
    assert {c.period for c in asked} == {2000, 3}
    found = recommend(RUN, Options(strategies=("DiLoCo",), periods=(2000,)))
    assert any("longer than practice" in note for note in found.notes)


def test_a_short_run_has_short_periods() -> None:
    run = replace(RUN, batch=10, samples=24 * 10 * 64 * AVERAGINGS_MIN)
    assert run.steps == 64 * AVERAGINGS_MIN
    assert max(choice.period for choice in allowed(run, Options())) == 64
    found = recommend(run, Options(strategies=("DiLoCo",), periods=(128,)))
    assert any("only 50 averagings" in note for note in found.notes)


def test_a_run_too_short_for_a_strategy_alone_is_refused() -> None:
    run = replace(RUN, batch=10, samples=2400)
    assert {choice.strategy for choice in allowed(run, Options())} == {"GradientAveraging"}
    with pytest.raises(ConfigError, match="too short"):
        allowed(run, Options(strategies=("DiLoCo",)))


def test_alternatives_change_one_thing() -> None:
    run = PlannedRun(350_000_000, 0.3, swarm_of([(36, 200 * MBIT, 200 * MBIT)], 0, 0.05))
    found = recommend(run, Options(group_sizes=(6, 8, 16)))
    best = found.best.choice
    assert found.alternatives.keys() == {
        "strategy", "schedule", "codec", "period", "group_size", "overlap",
    }  # fmt: skip
    for thing, rows in found.alternatives.items():
        assert rows
        for one in rows:
            changed = [
                field.name
                for field in fields(Choice)
                if getattr(one.choice, field.name) != getattr(best, field.name)
            ]
            assert thing in changed if thing == "strategy" else changed == [thing]
    assert {one.choice.codec.name for one in found.alternatives["codec"]} == {
        codec.name for codec in CODECS
    } - {best.codec.name}


def test_the_torus_is_considered_only_where_it_differs() -> None:
    schedules = {(c.group_size, c.schedule) for c in allowed(RUN, Options())}
    assert schedules == {(8, "grid"), (8, "torus"), (16, "grid"), (16, "torus"), (32, "grid")}


def test_words_name_what_was_compared() -> None:
    found = recommend(RUN)
    assert "within the slack of 10 %" in found.why or "Nothing that practice" in found.why
    clients = replace(RUN, swarm=swarm_of([(24, 200 * MBIT, 200 * MBIT)], clients=5))
    assert any("slowest 5 peers" in note for note in recommend(clients).notes)
    slow = PlannedRun(10**10, 0.1, swarm_of([(4, MBIT, MBIT)]))
    assert any("too slow" in note for note in recommend(slow).notes)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"strategies": ("SGD",)}, "LocalSGD"),
        ({"schedules": ("ring",)}, "torus"),
        ({"periods": (0,)}, "1 or more"),
        ({"group_sizes": (1,)}, "2 to 64"),
        ({"group_sizes": (65,)}, "2 to 64"),
        ({"slack": -0.1}, "0 or more"),
    ],
)
def test_options_that_make_no_sense_are_refused(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Options(**wrong)  # type: ignore[arg-type]
