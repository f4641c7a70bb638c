"""Single steps computed by hand, one or more for every policy. The arithmetic stands in the comments."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from adaptspec.bandits import POLICIES, Feedback, PolicyContext, make_policy
from tests.bandits.playing import teach, teach_all

CHECKED: set[str] = set()


def make(name, n_arms, **options):
    CHECKED.add(name)
    return make_policy(name, n_arms=n_arms, **options)


def test_ucb():
    policy = make("ucb", 2)
    assert policy.select().index == 0
    teach(policy, 0, 0.5)
    assert policy.select().index == 1
    teach(policy, 1, 0.25)
    # t = 2, n = (1, 1): 0.5 + sqrt(2 ln 2) = 0.5 + 1.177410 and 0.25 + 1.177410.
    assert policy.scores() == pytest.approx([1.677410, 1.427410], abs=1e-6)
    teach(policy, 0, 0.0)
    # t = 3, n = (2, 1): 0.25 + sqrt(2 * 1.098612 / 2) = 0.25 + 1.048147; 0.25 + sqrt(2 * 1.098612) = 0.25 + 1.482304.
    assert policy.scores() == pytest.approx([1.298147, 1.732304], abs=1e-6)
    assert policy.select().index == 1


def test_ucb_bonus_scales_with_the_range():
    policy = make("ucb", 2, gain_range=(0.2, 0.6))
    teach(policy, 0, 0.5)
    teach(policy, 1, 1.0)  # clipped to 0.6
    # Width 0.4: 0.5 + 0.4 * 1.177410 and 0.6 + 0.470964.
    assert policy.scores() == pytest.approx([0.970964, 1.070964], abs=1e-6)


@pytest.mark.parametrize("name", ["ucb", "ucb-tuned", "kl-ucb", "sw-ucb", "d-ucb", "ucbspec"])
def test_scores_of_scaled_gains_are_the_scaled_scores(name):
    unit = make_policy(name, n_arms=3)
    scaled = make_policy(name, n_arms=3, gain_range=(0.25, 0.75))
    for arm, gain in [(0, 0.2), (1, 0.9), (2, 0.5), (0, 0.4), (0, 0.1), (1, 1.0), (2, 0.0), (0, 0.3)] * 3:
        teach(unit, arm, gain)
        teach(scaled, arm, 0.25 + 0.5 * gain)
    assert scaled.scores() == pytest.approx(0.25 + 0.5 * unit.scores(), abs=1e-9)


def test_ucb_tuned():
    policy = make("ucb-tuned", 2)
    teach(policy, 0, 1.0)
    teach(policy, 1, 0.5)
    teach(policy, 0, 0.0)
    # t = 3. Arm 0: n = 2, variance 1/4, V > 1/4, so min is 1/4: 0.5 + sqrt(1.098612 / 2 / 4) = 0.5 + 0.370576.
    # Arm 1: n = 1, variance 0, V = sqrt(2 * 1.098612) > 1/4: 0.5 + sqrt(1.098612 / 4) = 0.5 + 0.524073.
    assert policy.scores() == pytest.approx([0.870576, 1.024073], abs=1e-6)


def test_kl_ucb():
    policy = make("kl-ucb", 2)
    teach(policy, 0, 0.0)
    teach(policy, 1, 1.0)
    # t = 2, n = 1: kl(0, q) = -ln(1 - q) = ln 2 gives q = 1/2; mean 1 can only be 1.
    assert policy.scores() == pytest.approx([0.5, 1.0], abs=1e-9)
    teach(policy, 0, 0.0)
    # t = 3, n = 2: -2 ln(1 - q) = ln 3 gives q = 1 - 1 / sqrt(3).
    assert policy.scores() == pytest.approx([1.0 - 1.0 / math.sqrt(3.0), 1.0], abs=1e-9)


def test_kl_ucb_with_c_and_range():
    policy = make("kl-ucb", 2, c=3.0, gain_range=(0.5, 1.0))
    for _ in range(9):
        teach(policy, 0, 0.5)
    teach(policy, 1, 0.5)
    # Scaled means are 0, t = 10: -n ln(1 - q) = ln 10 + 3 ln ln 10 = 2.302585 + 3 * 0.834032 = 4.804682.
    # n = 9: q = 1 - exp(-0.533854) = 0.413659, score 0.5 + 0.5 q = 0.706829; n = 1: q = 1 - exp(-4.804682) = 0.991809.
    assert policy.scores() == pytest.approx([0.706829, 0.995904], abs=1e-6)


def test_sw_ucb():
    policy = make("sw-ucb", 2, window=2)
    teach(policy, 0, 1.0)
    teach(policy, 1, 0.0)
    # min(t, 2) = 2: sqrt(0.6 * 0.693147) = 0.644894.
    assert policy.scores() == pytest.approx([1.644894, 0.644894], abs=1e-6)
    teach(policy, 0, 0.0)  # pushes arm 0's gain of 1 out of the window
    assert policy.scores() == pytest.approx([0.644894, 0.644894], abs=1e-6)
    teach(policy, 0, 1.0)  # pushes arm 1 out: it must be tried again
    assert policy.select().index == 1


def test_d_ucb():
    policy = make("d-ucb", 2, discount=0.75)
    teach(policy, 0, 1.0)
    teach(policy, 1, 0.0)
    # N = (0.75, 1), n = 1.75, ln n = 0.559616: 1 + 2 sqrt(0.6 * 0.559616 / 0.75) = 1 + 1.338197; 2 sqrt(0.335769).
    assert policy.scores() == pytest.approx([2.338197, 1.158912], abs=1e-6)


def test_ucbspec():
    policy = make("ucbspec", 2, delta=0.05)
    teach(policy, 0, 0.5)
    teach(policy, 1, 0.25)
    # t = 3, n = 1: (2 / 1) (1 + 2 ln(2 * 9 * sqrt 2 / 0.05)) = 2 (1 + 2 * 6.232677) = 26.930708, half its root 2.59474.
    assert policy.scores() == pytest.approx([3.094740, 2.844740], abs=1e-5)


def test_ucbspec_in_accepted_lengths():
    # Lengths 1 .. L + 1 as gains (Y - 1) / L on the range (0, 1): L times the score plus 1 is the paper's index.
    longest, lengths = 4, {0: 3, 1: 2}
    policy = make("ucbspec", 2, delta=0.1)
    for arm, length in lengths.items():
        teach(policy, arm, (length - 1) / longest)
    bonus = longest / 2 * math.sqrt(2.0 * (1.0 + 2.0 * math.log(2 * 3**2 * math.sqrt(2.0) / 0.1)))
    assert longest * policy.scores() + 1 == pytest.approx([3 + bonus, 2 + bonus])


def test_exp3():
    policy = make("exp3", 2, exploration=0.5)
    assert policy.probabilities().tolist() == [0.5, 0.5]
    teach(policy, 0, 1.0, propensity=0.5)
    # Estimate 1 / 0.5 = 2; w = (exp(0.5 * 2 / 2), 1); 0.5 * e^0.5 / (e^0.5 + 1) + 0.25 = 0.5 * 0.622459 + 0.25.
    assert policy.probabilities() == pytest.approx([0.561230, 0.438770], abs=1e-6)


def test_exp3_anytime():
    policy = make("exp3", 4)
    # gamma_1 = min(1, sqrt(4 ln 4 / (e - 1))) = min(1, 1.796...) = 1: uniform whatever was learnt.
    assert policy.probabilities().tolist() == [0.25] * 4
    for _ in range(9):
        teach(policy, 0, 0.5, propensity=0.25)
    # gamma_10 = sqrt(4 * 1.386294 / 1.718282 / 10) = 0.568081; G_0 = 18; w_0 = exp(0.568081 * 18 / 4) = 12.889
    gamma = math.sqrt(4.0 * math.log(4.0) / (math.e - 1.0) / 10.0)
    first = math.exp(gamma * 18.0 / 4.0)
    assert gamma == pytest.approx(0.568081, abs=1e-6)
    assert policy.probabilities()[0] == pytest.approx((1 - gamma) * first / (first + 3) + gamma / 4)


def test_exp3spec():
    policy = make("exp3spec", 2)
    teach(policy, 0, 0.25, propensity=0.5)
    # Loss 0.75 / 0.5 = 1.5; eta_2 = sqrt(ln 2 / (2 * 2)) = 0.416277; 1 / (1 + exp(0.624416)) = 0.348778.
    assert policy.probabilities() == pytest.approx([0.348778, 0.651222], abs=1e-6)


def test_exp3_ix():
    policy = make("exp3-ix", 2)
    teach(policy, 0, 0.25, propensity=0.5)
    # gamma_1 = sqrt(ln 2 / 2) / 2 = 0.294353; loss 0.75 / 0.794353 = 0.944165; eta_2 = 0.416277;
    # 1 / (1 + exp(0.393034)) = 0.402987.
    assert policy.probabilities() == pytest.approx([0.402987, 0.597013], abs=1e-6)


def test_exp3_s():
    policy = make("exp3-s", 2, exploration=0.5, share=0.1)
    teach(policy, 0, 1.0, propensity=0.5)
    # w = (0.5 e^(0.5 * 2 / 2), 0.5) + e * 0.1 / 2 = (0.824361, 0.5) + 0.135914; normalised (0.601605, 0.398395);
    # 0.5 w + 0.25.
    assert policy.probabilities() == pytest.approx([0.550802, 0.449198], abs=1e-6)


def test_exp3_s_defaults_follow_the_corollary():
    options = make("exp3-s", 8, horizon=5000, switches=4).options
    # gamma = sqrt(8 (4 ln 40000 + e) / ((e - 1) 5000)) = sqrt(8 * (4 * 10.596635 + 2.718282) / 8591.41) = 0.204939.
    assert options == {"exploration": pytest.approx(0.204939, abs=1e-6), "share": 1 / 5000}


def test_tsallis_inf():
    policy = make("tsallis-inf", 2)
    assert policy.probabilities() == pytest.approx([0.5, 0.5])
    # p = (0.36, 0.64) needs (a + z, z) = (1 / 0.6, 1 / 0.8), a = 5 / 12. At t = 2, eta / 2 = 1 / sqrt 2, so the loss
    # estimate is 5 sqrt 2 / 12, that is a loss of 5 sqrt 2 / 24 at propensity 1/2.
    teach(policy, 0, 1.0 - 5.0 * math.sqrt(2.0) / 24.0, propensity=0.5)
    assert policy.probabilities() == pytest.approx([0.36, 0.64], abs=1e-9)


def test_hedge():
    policy = make("hedge", 3, learning_rate=math.log(2.0))
    teach_all(policy, [1.0, 0.0, 0.0])
    assert policy.probabilities() == pytest.approx([0.5, 0.25, 0.25])  # weights 2 : 1 : 1


def test_hedge_anytime_and_horizon():
    policy = make("hedge", 2)
    teach_all(policy, [1.0, 0.0])
    # eta_2 = sqrt(8 ln 2 / 2) = 1.665109; 1 / (1 + exp(-1.665109)) = 0.840923.
    assert policy.probabilities()[0] == pytest.approx(0.840923, abs=1e-6)
    policy = make("hedge", 2, horizon=8)
    teach_all(policy, [1.0, 0.0])
    # eta = sqrt(ln 2) = 0.832555; 1 / (1 + exp(-0.832555)) = 0.696895.
    assert policy.probabilities()[0] == pytest.approx(0.696895, abs=1e-6)


def test_hedge_lets_unobserved_arms_sleep():
    policy = make("hedge", 3, learning_rate=math.log(4.0))
    teach_all(policy, [1.0, 0.0, 0.0], [True, True, False])
    # The mixture of the observed arms earned 1/2, so the third arm counts as 1/2: weights 4 : 1 : 2.
    assert policy.probabilities() == pytest.approx([4 / 7, 1 / 7, 2 / 7])
    teach_all(policy, [0.0, 0.0, 1.0], [True, False, False])
    # Only arm 0 was observed: the mixture is arm 0, and nothing moves.
    assert policy.probabilities() == pytest.approx([4 / 7, 1 / 7, 2 / 7])
    teach_all(policy, [0.5, 1.0, 0.0], [False, True, True])
    # Mixture of arms 1 and 2 at 1 : 2 earned 1/3. Weights 4 * 4^(1/3) : 1 * 4 : 2 * 1.
    expected = np.array([4 * 4 ** (1 / 3), 4.0, 2.0])
    assert policy.probabilities() == pytest.approx(expected / expected.sum())


def test_adahedge():
    policy = make("adahedge", 2)
    assert policy.learning_rate == math.inf
    teach_all(policy, [1.0, 0.0])
    # Uniform: h = 1/2, eta infinite: m = 1, Delta = 1/2; eta = ln 2 / (1/2) = 2 ln 2; weights 4 : 1.
    assert policy.learning_rate == pytest.approx(2.0 * math.log(2.0))
    assert policy.probabilities() == pytest.approx([0.8, 0.2])
    teach_all(policy, [0.0, 1.0])
    # h = 0.2; m = ln(0.8 * 1 + 0.2 * 4) / (2 ln 2) = ln 1.6 / 1.386294 = 0.339036; Delta = 0.5 + 0.139036.
    assert policy.learning_rate == pytest.approx(math.log(2.0) / 0.639036, abs=1e-5)
    assert policy.probabilities() == pytest.approx([0.5, 0.5])


def test_adahedge_follows_the_leaders_while_nothing_was_lost():
    policy = make("adahedge", 3)
    teach_all(policy, [0.5, 0.5, 0.5])
    assert policy.learning_rate == math.inf
    assert policy.probabilities() == pytest.approx([1 / 3] * 3)


def test_normal_hedge():
    policy = make("normal-hedge", 4)
    assert policy.scale() == 0.0
    teach_all(policy, [1.0, 1.0, 0.0, 0.0])
    # R = (1/2, 1/2, -1/2, -1/2). (2 e^x + 2) / 4 = e with x = R^2 / (2 c): x = ln(2 e - 1) = 1.489880,
    # c = 0.25 / 2.979760 = 0.083899.
    assert policy.scale() == pytest.approx(0.083899, abs=1e-6)
    assert policy.probabilities() == pytest.approx([0.5, 0.5, 0.0, 0.0])
    teach_all(policy, [1.0, 0.5, 0.0, 0.0])
    # Mixture 3/4: R = (3/4, 1/4, -5/4, -5/4); with y = 1 / (32 c): e^(9 y) + e^y + 2 = 4 e, y = 0.225642 by bisection;
    # p_0 / p_1 = 3 e^(8 y) = 18.242.
    y = 0.225642
    assert math.exp(9 * y) + math.exp(y) + 2 == pytest.approx(4 * math.e, abs=1e-4)
    assert policy.scale() == pytest.approx(1 / (32 * y), rel=1e-5)
    ratio = 3 * math.exp(8 * y)
    assert policy.probabilities() == pytest.approx([ratio / (1 + ratio), 1 / (1 + ratio), 0, 0], rel=1e-4)


def test_ada_normal_hedge():
    policy = make("ada-normal-hedge", 2)
    assert policy.probabilities() == pytest.approx([0.5, 0.5])
    teach_all(policy, [1.0, 0.0])
    # R = (1/2, -1/2), C = (1/2, 1/2). w_0 = (exp(1.5^2 / 4.5) - 1) / 2 = (e^0.5 - 1) / 2 = 0.324361;
    # w_1 = (exp(0.5^2 / 4.5) - 1) / 2 = 0.028564.
    assert policy.probabilities()[0] == pytest.approx(0.324361 / (0.324361 + 0.028564), abs=1e-5)


def test_fixed_share():
    policy = make("fixed-share", 2, learning_rate=math.log(2.0), share=0.5)
    teach_all(policy, [1.0, 0.0])
    assert policy.probabilities() == pytest.approx([7 / 12, 5 / 12])  # 0.5 * (2/3, 1/3) + 0.25


def test_fixed_share_rates_follow_the_corollary():
    options = make("fixed-share", 4, horizon=101, switches=5).options
    # alpha = 5 / 100; H(0.05) = 0.198515; eta = sqrt(8 (6 * 1.386294 + 100 * 0.198515) / 101) = 1.493731.
    assert options == {"share": pytest.approx(0.05), "learning_rate": pytest.approx(1.493731, abs=1e-5)}


def test_thompson():
    policy = make("thompson", 2, resolution=2)
    assert policy.probabilities() == pytest.approx([0.5, 0.5])
    teach(policy, 0, 1.0)
    # Cells 1/4 and 3/4. Posterior of arm 0 (1/4, 3/4), of arm 1 (1/2, 1/2); CDF at mid-cell (1/8, 5/8) and (1/4, 3/4).
    # p_0 = 1/4 * 1/4 + 3/4 * 3/4 = 0.625; p_1 = 1/2 * 1/8 + 1/2 * 5/8 = 0.375.
    assert policy.probabilities() == pytest.approx([0.625, 0.375])


def test_linucb():
    policy = make("linucb", 2, dimension=2)
    decision = policy.select([1.0, 0.0])
    assert decision.index == 0
    policy.update(decision, Feedback.of_arm(2, 0, gain=1.0))
    # A_0 = diag(2, 1), b_0 = (1, 0), theta_0 = (1/2, 0). At (1, 0): 1/2 + sqrt(1/2) against 0 + 1: arm 0 again.
    assert policy.select([1.0, 0.0]).index == 0
    # At (0, 1) both arms score 1: the lower index. At (1, 1): 1/2 + sqrt(3/2) = 1.725 against sqrt 2: arm 0.
    assert policy.select(PolicyContext(features=np.array([0.0, 1.0]))).index == 0
    # At (-1, 0): -1/2 + sqrt(1/2) = 0.207 against 1: arm 1.
    assert policy.select([-1.0, 0.0]).index == 1


def test_fixed():
    assert [make("fixed", 4, index=2).select().index for _ in range(3)] == [2, 2, 2]
    assert make_policy("fixed:3", n_arms=4).select().index == 3


def test_follow_the_leader():
    policy = make("follow-the-leader", 2)
    assert teach_all(policy, [0.25, 0.5]).index == 0
    assert policy.select().index == 1
    teach_all(policy, [0.75, 0.0], [True, False])
    # Means 0.5 over two rounds and 0.5 over one: the lower index.
    assert policy.select().index == 0
    teach_all(policy, [0.0, 0.75], [False, True])  # means 0.5 and 0.625
    assert policy.select().index == 1


def test_ema():
    policy = make("ema", 2, rate=0.5, margin=0.125)
    teach_all(policy, [0.25, 0.5])
    assert policy.select().index == 1
    teach_all(policy, [1.0, 0.5])  # 0.25 + 0.5 * 0.75 = 0.625: ahead of 0.5 by no more than the margin
    assert policy.select().index == 1
    teach_all(policy, [0.75, 0.5])  # 0.6875: ahead by 0.1875
    assert policy.select().index == 0
    teach_all(policy, [0.5, 0.625], [False, True])  # arm 0 unobserved: 0.6875 against 0.5625
    assert policy.select().index == 0


def test_heuristic():
    policy = make("heuristic", 4, lengths=(1, 2, 4, 8), start=4)
    played = []
    for gain in (1.0, 1.0, 0.5, 1.0):  # lengths 4, then 6, 8, 7, 8 (9 is more than the longest)
        played.append(policy.select().index)
        teach(policy, played[-1], gain)
    assert played == [2, 2, 3, 2]
    assert policy.select().index == 3


def test_heuristic_goes_by_counts_where_there_are_any():
    policy = make("heuristic", 4, lengths=(1, 2, 4, 8), start=4)
    decision = policy.select()
    policy.update(decision, Feedback.from_gains([0.0] * 4, drafted=3, accepted=3))  # 6
    policy.update(policy.select(), Feedback.from_gains([1.0] * 4, drafted=4, accepted=3))  # 5
    policy.update(policy.select(), Feedback.from_gains([1.0] * 4, drafted=4, accepted=3))  # 4
    policy.update(policy.select(), Feedback.from_gains([1.0] * 4, drafted=4, accepted=3))  # 3
    assert policy.select().index == 1


def test_heuristic_leaves_off_again():
    policy = make("heuristic", 3, lengths=(0, 4, 8), start=4)
    for _ in range(3):
        teach(policy, policy.select().index, 0.0)
        assert policy.select().index == 0
        teach(policy, 0, 0.0)  # 3 + 2 = 5: length 0 rejects nothing
        assert policy.select().index == 1
        teach(policy, 1, 0.0)


def test_lookup_else_by_evidence():
    policy = make("lookup-else", 3, preferred=1, fallback=2, min_evidence=3.0)
    assert policy.select(PolicyContext(evidence=3.0)).index == 1
    assert policy.select(PolicyContext(evidence=2.0)).index == 2
    assert policy.select(4.5).index == 1


def test_lookup_else_by_gain():
    policy = make("lookup-else", 2, min_gain=0.5, rate=0.5, retry_every=3)
    assert policy.select().index == 0
    teach(policy, 0, 0.25)  # average 1 -> 0.625
    assert policy.select().index == 0
    teach(policy, 0, 0.25)  # 0.4375
    assert [policy.select().index for _ in range(6)] == [1, 1, 0, 1, 1, 0]
    teach(policy, 0, 1.0)  # every select counts as a step: after this one 0.71875 is good again
    assert policy.select().index == 0


def test_every_policy_was_computed_by_hand():
    assert set(POLICIES) == CHECKED


def test_played_arm_can_be_replaced():
    policy = make_policy("ucb", n_arms=3)
    decision = replace(policy.select(), index=2)
    policy.update(decision, Feedback.of_arm(3, 2, gain=1.0))
    assert [policy.select().index for _ in range(3)] == [1, 0, 1]
