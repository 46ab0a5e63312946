"""DuoServe's Eqs. 2 and 3 against numbers worked out by hand."""

import numpy as np
import torch

from moetool.training.predictor import build
from moetool.training.tokens import Tokens
from predictors.affinity import affinity
from predictors.popularity import popularity
from tests.synthetic_routes import make_spec

# Three tokens, two layers of four experts, two experts a token.
ROUTES_NLK = np.array([[[0, 1], [2, 3]], [[0, 2], [3, 1]], [[1, 0], [2, 0]]])


def test_popularity_is_the_share_of_all_choices() -> None:
    # Layer 0: expert 0 three times, 1 twice, 2 once, 3 never, of six. Layer 1: 1, 1, 2, 2 of six.
    expected_LE = np.array([[3, 2, 1, 0], [1, 1, 2, 2]]) / 6
    np.testing.assert_allclose(popularity(ROUTES_NLK, 4), expected_LE, rtol=1e-6)


def test_affinity_is_the_share_of_what_followed() -> None:
    expected_EE = np.array(
        [
            [1, 1, 2, 2],  # after 0: {2, 3}, {3, 1}, {2, 0}
            [1, 0, 2, 1],  # after 1: {2, 3}, {2, 0}
            [0, 1, 0, 1],  # after 2: {3, 1}
            [1, 1, 2, 2],  # 3 was never chosen: the popularity of layer 1
        ]
    )
    affinity_MEE = affinity(ROUTES_NLK, 4)
    assert affinity_MEE.shape == (1, 4, 4)
    np.testing.assert_allclose(affinity_MEE[0], expected_EE / expected_EE.sum(axis=1, keepdims=True), rtol=1e-6)


def test_statistics_do_not_overflow_the_type_of_the_ids() -> None:
    routes_NLK = np.full((2, 2, 1), 255, np.uint8)
    assert popularity(routes_NLK, 256)[0, 255] == 1
    assert affinity(routes_NLK, 256)[0, 255, 255] == 1


def test_affinity_scores_are_the_mean_of_the_rows_just_chosen() -> None:
    predictor = build("affinity", make_spec(num_layers=2, num_experts=4, top_k=2))
    predictor.count(Tokens(experts_TPK=torch.from_numpy(ROUTES_NLK)))
    scores_TE = predictor.layer_scores(Tokens(experts_TPK=torch.tensor([[[0, 2]]])), 1)
    expected_E = (np.array([1, 1, 2, 2]) / 6 + np.array([0, 1, 0, 1]) / 2) / 2
    np.testing.assert_allclose(scores_TE.numpy()[0], expected_E, rtol=1e-6)


def test_popularity_scores_do_not_alias_the_statistics() -> None:
    predictor = build("popularity", make_spec(num_layers=2, num_experts=4, top_k=2))
    predictor.count(Tokens(experts_TPK=torch.from_numpy(ROUTES_NLK)))
    predictor.layer_scores(Tokens(experts_TPK=torch.tensor([[[0, 2]]])), 1).zero_()
    np.testing.assert_allclose(predictor.get_buffer("popularity_LE").sum(dim=1), 1, rtol=1e-6)
