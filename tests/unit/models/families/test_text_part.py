"""A language model that transformers would compute wrongly is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from moetool.base.errors import UsageError
from moetool.models.checkpoint import Checkpoint
from moetool.models.families.text_part import field_of
from tests import families
from tests.refusals import refused


class _NormOfAllGroups(torch.nn.Module):
    """The gated norm of transformers before 5.23."""

    def __init__(self, hidden_size: int, group_size: int = 0, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(hidden_size))


@pytest.mark.parametrize("groups", [1, 2])
def test_a_norm_over_all_groups_is_refused_where_there_are_several(
    groups: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = "transformers.models.granitemoehybrid.modeling_granitemoehybrid"
    config = families.config("granitemoehybrid", mamba_n_groups=groups).to_dict()
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(f"{module}.GraniteMoeHybridRMSNormGated", _NormOfAllGroups)
    checkpoint = Checkpoint(tmp_path, weights=False)
    if groups == 1:
        assert checkpoint.skeleton.config.mamba_n_groups == 1
        return
    with refused(UsageError, tmp_path / "config.json", "mamba_n_groups: found 2", "use transformers 5.23 or newer"):
        _ = checkpoint.skeleton


@pytest.mark.parametrize(
    ("config", "message", "field"),
    [
        ({"hidden_act": "silu", "rope_parameters": {"rope_type": "foo"}}, "'foo'", "rope_type: "),
        ({"hidden_act": "silu", "rope_parameters": {"rope_type": "silu"}}, "'silu'", ""),
        ({"num_hidden_layers": "4"}, "field 'num_hidden_layers' expected int (value: '4')", ""),
        ({"_name": "foo", "id2label": {0: "bar"}}, "'foo'", ""),
    ],
)
def test_a_field_is_named_only_if_no_other_can_be_meant(config: dict[str, Any], message: str, field: str) -> None:
    assert field_of(config, ValueError(message)) == field
