"""Averages of measured costs, and when a policy hears of them."""

import pytest

from moetool.caching.host_split import HostCosts
from moetool.caching.policies import smoe
from moetool.caching.policy import build_policy
from moetool.runtime.experts.cost_meter import CostMeter
from tests.synthetic import make_spec


def test_it_tells_of_averages_that_have_moved() -> None:
    meter = CostMeter(past=4)
    meter.loaded(2.0)
    assert meter.changed_means() is None  # nothing is known of the host
    meter.hosted(1.0)
    assert meter.changed_means() == (2.0, 1.0)
    meter.loaded(2.2)
    assert meter.changed_means() is None  # 2.1: by a twentieth
    meter.loaded(4.0)
    assert meter.changed_means() == (pytest.approx(8.2 / 3), 1.0)
    for _ in range(4):
        meter.loaded(1.0)
    assert meter.changed_means() == (1.0, 1.0)  # of the last four alone
    assert [meter.due() for _ in range(17)] == [True, *[False] * 15, True]


def test_costs_begin_equal_and_follow_what_is_measured() -> None:
    assert HostCosts(live=True).splits and not HostCosts(live=True, host=False).splits
    assert HostCosts(live=True).at_first() == HostCosts(load_s=1.0, host_s=1.0)
    given = smoe.Options(live=True, load_s=3.0, host_s=1.0, host_token_s=2.0)
    assert given.at_first() is given and given.seconds(2) == 3.0
    assert given.measured(5.0, 4.0).seconds(9) == 4.0
    made = build_policy("smoe", make_spec(layers=1, experts=6, top_k=4), {"live": True}, 5)
    assert made.live_costs and made.computes_on_host
    assert not build_policy("hybrimoe", make_spec(), {}, 5).live_costs
