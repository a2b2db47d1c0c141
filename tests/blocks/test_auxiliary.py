"""Terms of the loss that modules of a model offer."""

import pytest
import torch
from torch import nn

from lightning_app.blocks.spans import AuxiliaryTerms, Term, auxiliary_terms


class Penalised(nn.Linear, AuxiliaryTerms):
    def auxiliary_terms(self) -> dict[str, Term]:
        return {
            "size": Term(self.weight.square().sum(), weight=0.5),
            "steps": Term(torch.tensor(6.0), weight=2.0, over_tokens=True),
        }


def test_a_sum_over_tokens_is_divided_no_penalty_and_terms_of_one_name_are_added() -> None:
    module = Penalised(2, 3)
    found = auxiliary_terms(nn.Sequential(nn.ReLU(), module), torch.tensor(4.0))
    size = float(module.weight.detach().square().sum())
    assert float(found["size"].detach()) == pytest.approx(0.5 * size)
    assert float(found["steps"]) == 2.0 * 6.0 / 4.0
    found["size"].backward()
    torch.testing.assert_close(module.weight.grad, module.weight.detach())
    model = nn.Sequential(Penalised(2, 3), Penalised(3, 2))
    assert float(auxiliary_terms(model, torch.tensor(3.0))["steps"]) == 2 * 2.0 * 6.0 / 3.0
    assert auxiliary_terms(nn.Linear(2, 3), torch.tensor(4.0)) == {}
