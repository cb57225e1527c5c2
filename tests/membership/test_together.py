"""An adversary who has the whole model: all layers together, and the gradients of each example."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lmdp
from lmdp.audit import Reference
from lmdp.membership.evidence import Evidence
from lmdp.membership.examples import Examples
from lmdp.membership.instrument import attack
from lmdp.membership.together import ALL_LAYERS, WHITE_BOX, attack_views, gradient_norms, views_of

N = 150


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 3))


def pool(seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2 * N, 8, generator=generator), torch.randint(0, 3, (2 * N,), generator=generator)


def memorised(x: Tensor, y: Tensor, seed: int = 0) -> nn.Module:
    """Random labels, half learnt by heart."""
    model = net(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-2)
    for _ in range(60):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model


def test_gradient_norms_are_those_of_one_example_at_a_time() -> None:
    model, (x, y) = net().double(), pool()
    given = gradient_norms(model, Examples(x.double(), y, np.ones(2 * N, dtype=bool), 0))
    assert given is not None
    for i in (0, 63, 64, 299):
        model.zero_grad()
        F.cross_entropy(model(x[i : i + 1].double()), y[i : i + 1]).backward()
        squared = [sum(float((p.grad**2).sum()) for p in model[at].parameters()) for at in (0, 2)]  # type: ignore[misc]
        np.testing.assert_allclose(given[i], np.log([*squared, sum(squared)]), rtol=1e-6)


def test_a_white_box_audit_leaves_the_model_and_its_gradients_as_they_were() -> None:
    x, y = pool()
    model = net().train()
    F.cross_entropy(model(x), y).backward()
    before = [(p.clone(), p.grad.clone()) for p in model.parameters()]  # type: ignore[union-attr]
    lmdp.audit(model, (x[:N], y[:N]), (x[N:], y[N:]), white_box=True, controls=False, views=False)
    assert model.training
    assert all(torch.equal(p, old) and torch.equal(p.grad, grad) for p, (old, grad) in zip(model.parameters(), before))  # type: ignore[arg-type]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_layers_that_each_give_away_a_little_give_away_more_together() -> None:
    rng = np.random.default_rng(0)
    member = np.arange(800) % 2 == 0
    layers = {}
    for name in "abcd":
        rows = rng.normal(size=(800, 6))
        layers[name] = Evidence(rows * np.where(member, 1.12, 1.0)[:, None])
    alone = max(attack(evidence, member, 0).metrics.auc for evidence in layers.values())
    both = attack_views(views_of(layers, None), member, 0)
    assert set(both) == {ALL_LAYERS}
    assert both[ALL_LAYERS].metrics.auc > alone + 0.03


def test_what_was_learnt_by_heart_shows_in_the_gradients_alone_and_beside_references(tmp_path: Path) -> None:
    x, y = pool()
    member = np.random.default_rng(0).random((3, 2 * N)) < 0.5
    member[0] = np.arange(2 * N) < N
    models = [memorised(x[torch.from_numpy(mask)], y[torch.from_numpy(mask)], k) for k, mask in enumerate(member)]
    sides = (x[:N], y[:N]), (x[N:], y[N:])
    options = {"white_box": True, "controls": False, "views": False}
    report = lmdp.audit(models[0], *sides, **options)
    assert [leak.name for leak in report.together] == [ALL_LAYERS, WHITE_BOX]
    assert report.together[1].auc > 0.75
    references = [Reference(model, mask[:N], mask[N:]) for model, mask in zip(models[1:], member[1:])]
    beside = lmdp.audit(models[0], *sides, references=references, **options)
    assert [leak.name for leak in beside.together] == [ALL_LAYERS, WHITE_BOX]
    assert "carried + " in beside.together[1].attack
    assert beside.together[1].auc > 0.75
    beside.to_json(tmp_path / "audit.json")
    assert lmdp.AuditReport.load(tmp_path / "audit.json") == beside
    assert WHITE_BOX in str(beside)
    beside.to_html(tmp_path / "audit.html")
    assert WHITE_BOX in (tmp_path / "audit.html").read_text()


def test_without_labels_there_are_no_gradients_and_an_attached_model_is_refused() -> None:
    x, y = pool()
    report = lmdp.audit(net(), x[:N], x[N:], white_box=True, controls=False, views=False)
    assert [leak.name for leak in report.together] == [ALL_LAYERS]
    model = net()
    engine = lmdp.PrivacyEngine()
    engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=30),
        noise_multiplier=1,
        max_grad_norm=1,
    )
    sides = (x[:N], y[:N]), (x[N:], y[N:])
    with pytest.raises(ValueError, match=r"engine\.detach\(\)"):
        lmdp.audit(model, *sides, white_box=True, controls=False, views=False)
    engine.detach()
    lmdp.audit(model, *sides, white_box=True, controls=False, views=False)
    with pytest.raises(ValueError, match="there is no model"):
        lmdp.audit(None, x[:N], x[N:], white_box=True)
