"""The pretend device behaves as a device: it computes what the host computes, mixes with nothing, and is counted."""

from __future__ import annotations

import copy
import ctypes
import faulthandler
import io
import os
import signal
import threading
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, vjp, vmap
from torch.utils.checkpoint import checkpoint
from transformers import BertConfig, BertForSequenceClassification

from tests.device.device import Crossings, counting

HOST = torch.device("cpu")
Act = Callable[..., Any]


def table(acts: dict[str, Act]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("act", acts.values(), ids=acts.keys())


# ------------------------------------------------------------ it is a second device


def test_tests_without_it_meet_no_accelerator() -> None:
    assert not torch.accelerator.is_available()
    assert not hasattr(torch, "pretend")


def test_there_are_two(pretend: torch.device) -> None:
    assert torch.accelerator.current_accelerator() == torch.device("pretend")
    assert torch.accelerator.device_count() == torch.get_device_module("pretend").device_count() == 2
    assert torch.ones(1, device="pretend").device == pretend
    with torch.get_device_module("pretend").device(1):
        assert torch.ones(1, device="pretend").device == torch.device("pretend:1")
    with pytest.raises(RuntimeError, match="there is no device pretend:2"):
        torch.ones(1, device="pretend:2")


@pytest.mark.parametrize("where", ["cpu", "pretend"])
def test_it_can_be_asked_for_by_a_parameter(where: str, request: pytest.FixtureRequest) -> None:
    device = request.getfixturevalue("pretend") if where == "pretend" else HOST
    assert torch.ones(1, device=where).device == device
    assert torch.accelerator.is_available() == (where == "pretend")


def test_gradients_are_computed_in_a_thread_of_the_device(pretend: torch.device) -> None:
    threads = []
    x = torch.ones(3, device=pretend, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: threads.append(threading.current_thread()))
    y.sum().backward()
    assert threads != [threading.current_thread()]


MIXTURES: dict[str, Act] = {
    "sum": lambda x, host: x + host,
    "product": lambda x, host: x.mm(host.T),
    "in place": lambda x, host: x.add_(host),
    "into the host": lambda x, host: host.add_(x),
    "number into the host": lambda x, host: host.sum().add_(x.sum()),
    "concatenated": lambda x, host: torch.cat([x, host]),
    "stacked numbers": lambda x, host: torch.stack([x.sum(), host.sum()]),
    "chosen": lambda x, host: torch.where(x > 0, x, host),
    "linear": lambda x, host: F.linear(x, host),
    "embedded": lambda x, host: F.embedding(torch.tensor([0, 1]), x),
    "convolved": lambda x, host: F.conv1d(x[None], host[:, :2, None]),
    "many": lambda x, host: torch._foreach_add([x], [host]),
    "written": lambda x, host: torch.add(x, x, out=host),
    "gathered": lambda x, host: x.gather(0, host.long()),
    "two devices": lambda x, host: x + x.to("pretend:1"),
    "number of another device": lambda x, host: x + x.sum().to("pretend:1"),
}


@table(MIXTURES)
def test_tensors_of_the_host_and_of_other_devices_are_refused(pretend: torch.device, act: Act) -> None:
    with pytest.raises(RuntimeError, match="Expected all tensors to be on the same device"):
        act(torch.ones(2, 3, device=pretend), torch.ones(2, 3))


NUMBERS: dict[str, Act] = {
    "sum": lambda x: x + torch.tensor(2.0),
    "wide number": lambda x: torch.tensor(2.0, dtype=torch.float64) * x,
    "power": lambda x: torch.pow(torch.tensor(2.0), x),
    "chosen": lambda x: torch.where(x > 0, x, torch.tensor(0.0)),
    "filled": lambda x: x.masked_fill(x > 0, torch.tensor(0.5)),
    "bounded": lambda x: x.clamp(min=torch.tensor(0.0)),
    "put": lambda x: x.index_put((torch.arange(2, device=x.device),), torch.tensor(1.0)),
    "many": lambda x: torch._foreach_mul([x], torch.tensor(2.0))[0],
    "rows": lambda x: x[torch.tensor([1, 0])],
    "rows put": lambda x: x.index_put((torch.tensor([1, 0]),), x),
}


@table(NUMBERS)
def test_numbers_and_indices_of_the_host_are_taken(pretend: torch.device, act: Act) -> None:
    x = torch.randn(2, 3)
    assert torch.equal(act(x.to(pretend)).cpu(), act(x))


def test_the_host_reads_nothing_without_a_copy(pretend: torch.device) -> None:
    x = torch.ones(2, device=pretend)
    with pytest.raises(TypeError, match=r"Use Tensor\.cpu"):
        x.numpy()
    child = os.fork()
    if child == 0:
        faulthandler.disable()
        ctypes.string_at(x.data_ptr(), 4)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGSEGV


def test_a_model_is_saved_and_loaded_where_it_was_or_where_one_likes(pretend: torch.device) -> None:
    file, model = io.BytesIO(), nn.Linear(3, 2).to("pretend:1")
    torch.save(model.state_dict(), file)
    for where, expected in [(None, torch.device("pretend:1")), ("cpu", HOST), (pretend, pretend)]:
        file.seek(0)
        weight = torch.load(file, map_location=where)["weight"]
        assert weight.device == expected
        assert torch.equal(weight.cpu(), model.weight.cpu())


# ------------------------------------------------------------ it computes what the host computes


def attend(x: Tensor, **how: Any) -> Tensor:
    return F.scaled_dot_product_attention(x, x.flip(1), x.roll(1), **how)


def attend_by_hand(x: Tensor) -> Tensor:
    return (x @ x.flip(1).mT / 2).softmax(-1) @ x.roll(1)


def resized(x: Tensor) -> Tensor:
    out = torch.empty(0, device=x.device, dtype=x.dtype)
    torch.add(x.detach(), 1, out=out)
    return out.resize_(2, 2) * x.flatten()[:4].view(2, 2)


def doubled_in_part(x: Tensor) -> Tensor:
    y = x.clone()
    y[1:].mul_(2)
    y.mT[0].add_(1)
    return y


COMPUTATIONS: dict[str, Act] = {
    "attention": attend,
    "causal attention": lambda x: attend(x, is_causal=True),
    "masked attention": lambda x: attend(x, attn_mask=torch.ones(5, 5, device=x.device).tril().bool()),
    "attention by hand": attend_by_hand,
    "layer norm": lambda x: F.layer_norm(x, (4,)),
    "group norm": lambda x: F.group_norm(x.transpose(1, 2), 2),
    "rms norm": lambda x: F.rms_norm(x, (4,)),
    "batch norm": lambda x: F.batch_norm(x.mT, None, None, training=True),
    "embedding": lambda x: F.embedding(torch.tensor([[1, 4], [1, 0]], device=x.device), x[0], padding_idx=0),
    "embedding bag": lambda x: F.embedding_bag(torch.tensor([[1, 4], [1, 0]], device=x.device), x[0]),
    "convolution": lambda x: F.conv1d(x, x[:2, :, :2], x[0, 0, :2], padding=1),
    "transposed convolution": lambda x: F.conv_transpose1d(x, x[0, :, None], stride=2),
    "grouped convolution": lambda x: F.conv2d(x.view(1, 5, 3, 4), x[:, :, :1, None].reshape(5, 1, 3, 1), groups=5),
    "volume convolution": lambda x: F.conv3d(x[None, None], x[None, None, :2, :2, :2]),
    "pooling": lambda x: F.max_pool1d(x, 2) + F.adaptive_avg_pool1d(x, 2),
    "loss": lambda x: F.cross_entropy(x[0], torch.tensor([0, 1, 2, 3, 0], device=x.device)),
    "masked": lambda x: x.masked_fill(x > 0, 0.5).masked_select(x < 0.4),
    "added at": lambda x: x.index_add(1, torch.tensor([0, 2, 2], device=x.device), x[:, :3]),
    "scattered": lambda x: x.scatter_add(0, torch.zeros(1, 5, 4, dtype=torch.long, device=x.device), x[1:2]),
    "chosen rows": lambda x: x[torch.tensor([0, 2], device=x.device), 1:],
    "where": lambda x: x[x.abs() > 0.5],
    "strided": lambda x: x.as_strided((3, 2), (4, 1), 2) + x.unfold(1, 2, 3)[..., 0, 0, :1],
    "in place": doubled_in_part,
    "resized": resized,
    "conjugated": lambda x: torch.view_as_real(torch.complex(x, x + 1).conj().mT.clone()),
    "spectrum": lambda x: torch.fft.rfft(x).abs(),
    "solved": lambda x: torch.linalg.solve(x[0, :4] + 9 * torch.eye(4, device=x.device, dtype=x.dtype), x[1, :4]),
}


@table(COMPUTATIONS)
def test_results_and_gradients_are_the_hosts(pretend: torch.device, act: Act) -> None:
    values = torch.randn(3, 5, 4, dtype=torch.float64)
    results = []
    for where in (HOST, pretend):
        x = values.to(where).requires_grad_()
        y = act(x)
        (slope,) = torch.autograd.grad(y.square().sum(), x)
        assert y.device == slope.device == where
        results.append((y.detach().cpu(), slope.cpu()))
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


def test_what_is_changed_in_place_is_what_is_given_back(pretend: torch.device) -> None:
    with torch.inference_mode():
        x = torch.ones(3, device=pretend)
        assert torch.ops.aten.add_.Tensor(x, 1) is x
        assert torch.ops.aten.resize_.default(x, [5]) is x
        assert x.shape == (5,)


INTEGERS: dict[str, Act] = {
    "bits": lambda n: (n & 6 | 1 ^ n) << 2 >> 1,
    "other way to read": lambda n: n.view(torch.int32).view(torch.float64).view(torch.int64),
    "distinct": lambda n: torch.stack(torch.unique(n % 5, return_counts=True)),
    "nonzero": lambda n: (n % 3).nonzero(),
    "truth": lambda n: (n > 3).any(0) | ~(n < 5).all(0),
    "repeated": lambda n: n.repeat_interleave(n.flatten()[:3], 0),
    "order": lambda n: n.flip(1).argsort(1),
}


@table(INTEGERS)
def test_integers_are_the_hosts(pretend: torch.device, act: Act) -> None:
    n = torch.arange(12).view(3, 4).mT.contiguous().mT  # not contiguous
    n = n if act is not INTEGERS["other way to read"] else n.contiguous()
    assert torch.equal(act(n.to(pretend)).cpu(), act(n))


def cnn() -> nn.Module:
    front = [nn.Conv2d(1, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.PReLU(4), nn.MaxPool2d(2), nn.Conv2d(4, 2, 2)]
    return nn.Sequential(*front, nn.Flatten(), nn.LayerNorm(18), nn.Linear(18, 3))


class Recurrent(nn.Module):
    """Packed sequences through an LSTM and a GRU."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.lstm = nn.Embedding(9, 4), nn.LSTM(4, 3, 2, bidirectional=True, batch_first=True)
        self.gru, self.head = nn.GRU(6, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(self.table(x), torch.tensor([6, 4, 3, 1]), batch_first=True)
        unpacked, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True)
        return self.head(self.gru(unpacked)[1][0])


class Bert(nn.Module):
    def __init__(self, attention: str) -> None:
        super().__init__()
        shape = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}
        config = BertConfig(vocab_size=9, num_labels=3, **shape, hidden_dropout_prob=0, attention_probs_dropout_prob=0)
        config._attn_implementation = attention
        self.bert = BertForSequenceClassification(config)

    def forward(self, x: Tensor) -> Tensor:
        return self.bert(x, attention_mask=(x != 8).long()).logits


MODELS: dict[str, Callable[[], nn.Module]] = {
    "CNN": cnn,
    "recurrent": Recurrent,
    "BERT, eager": lambda: Bert("eager"),
    "BERT, sdpa": lambda: Bert("sdpa"),
}
STEPS = 3
OPTIMIZERS: dict[str, Callable[[Iterable[Tensor]], torch.optim.Optimizer]] = {
    "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
    "SGD, one by one": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, foreach=False),
    "SGD, fused": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, fused=True),
    "AdamW": lambda p: torch.optim.AdamW(p, eps=1e-3),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, eps=1e-3, fused=True),
}


def batch(model: nn.Module) -> Tensor:
    return torch.randn(4, 1, 8, 8).double() if isinstance(model, nn.Sequential) else torch.randint(9, (4, 6))


def train(model: nn.Module, x: Tensor, optimizer: torch.optim.Optimizer) -> None:
    y = torch.arange(4, device=x.device) % 3
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS.keys())
def test_training_steps_are_the_hosts_and_cross_nothing(pretend: torch.device, build: Callable[[], nn.Module]) -> None:
    start = build().double()
    x = batch(start)
    for name, optimizer in OPTIMIZERS.items():
        here, there = copy.deepcopy(start), copy.deepcopy(start).to(pretend)
        train(here, x, optimizer(here.parameters()))
        moved, steps = x.to(pretend), optimizer(there.parameters())
        with counting() as crossed:
            train(there, moved, steps)
        reads = STEPS * isinstance(start, Bert)  # transformers asks of a mask whether it hides anything
        read = {"to_host": reads, "bytes_to_host": reads, "synchronisations": reads}
        assert _nonzero(crossed) == {count: n for count, n in read.items() if n}, name
        trained = [p.detach().cpu() for p in there.parameters()]
        torch.testing.assert_close(trained, [p.detach() for p in here.parameters()], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("build", [lambda: nn.Linear(4, 3), nn.PReLU, lambda: nn.Conv1d(2, 3, 2)])
def test_functional_transforms_are_the_hosts(pretend: torch.device, build: Callable[[], nn.Module]) -> None:
    model = build().double()
    x = torch.randn(5, 2, 4, dtype=torch.float64)
    results = []
    for where in (HOST, pretend):
        here = copy.deepcopy(model).to(where)
        parameters = {name: p.detach() for name, p in here.named_parameters()}

        def loss(p: dict[str, Tensor], one: Tensor) -> Tensor:
            return functional_call(here, p, (one[None],)).square().sum()

        slopes = vmap(grad(loss), (None, 0))(parameters, x.to(where))
        value, back = vjp(lambda p: loss(p, x[0].to(where)), parameters)
        results.append([t.cpu() for t in (*slopes.values(), value, *back(torch.ones_like(value))[0].values())])
    torch.testing.assert_close(results[1], results[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_and_a_scaled_loss(pretend: torch.device, dtype: torch.dtype) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 2)).to(pretend)
    optimizer, scaler = torch.optim.SGD(model.parameters(), 0.1), torch.amp.GradScaler("pretend", init_scale=8)
    before = model[0].weight.detach().clone()
    with torch.autocast("pretend", dtype=dtype):
        y = model(torch.randn(3, 4, device=pretend))
        assert (y.dtype, y.softmax(-1).dtype) == (dtype, torch.float32)
        assert torch.get_autocast_dtype("pretend") == dtype
    scaler.scale(y.float().square().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(before, model[0].weight)


# ------------------------------------------------------------ its randomness

DRAWS: dict[str, Act] = {
    "normal": lambda x, g: x.normal_(generator=g),
    "uniform": lambda x, g: x.uniform_(generator=g),
    "exponential": lambda x, g: x.exponential_(generator=g),
    "bernoulli": lambda x, g: x.bernoulli_(0.3, generator=g),
    "of chances": lambda x, g: torch.bernoulli(x.fill_(0.5), generator=g),
    "integers": lambda x, g: x.random_(0, 99, generator=g),
    "new normal": lambda x, g: torch.randn(50, device=x.device, generator=g),
    "new integers": lambda x, g: torch.randint(99, (50,), device=x.device, generator=g),
    "order": lambda x, g: torch.randperm(50, device=x.device, generator=g),
    "categories": lambda x, g: torch.multinomial(x.fill_(1), 30, generator=g),
}
HIDDEN_DRAWS: dict[str, Act] = {
    "dropout": lambda x: F.dropout(x.fill_(1)),
    "dropout of channels": lambda x: F.dropout1d(x.fill_(1)[:, None]),
    "alpha dropout": lambda x: F.alpha_dropout(x.fill_(1), training=True),
    "attention": lambda x: attend(x.normal_().view(2, 5, 5), dropout_p=0.5),
    "like another": torch.rand_like,
    "layer": lambda x: nn.Linear(5, 5, device=x.device).weight.detach(),
    "vectorized": lambda x: vmap(F.dropout, randomness="different")(x.fill_(1)),
}


@table(DRAWS)
def test_draws_are_of_the_given_generator(pretend: torch.device, act: Act) -> None:
    x, first, second = torch.empty(50, device=pretend), *(torch.Generator(pretend).manual_seed(3) for _ in range(2))
    state, of_host = torch.get_device_module("pretend").get_rng_state(), torch.get_rng_state()
    drawn = act(x, first).clone()
    assert not torch.equal(drawn, act(x, first))
    assert torch.equal(drawn, act(x, second))
    assert torch.equal(of_host, torch.get_rng_state())
    assert torch.equal(state, torch.get_device_module("pretend").get_rng_state())
    with pytest.raises(RuntimeError, match="generator"):
        act(x, torch.Generator())
    with pytest.raises(RuntimeError, match="generator"):
        act(torch.empty(50), first)


@table({**HIDDEN_DRAWS, **{name: lambda x, draw=draw: draw(x, None) for name, draw in DRAWS.items()}})
def test_draws_without_a_generator_are_of_the_devices(pretend: torch.device, act: Act) -> None:
    x, of_host = torch.empty(50, device=pretend), torch.get_rng_state()
    torch.get_device_module("pretend").manual_seed_all(5)
    state = torch.get_device_module("pretend").get_rng_state()
    drawn = act(x).clone()
    assert not torch.equal(drawn, act(x))
    torch.get_device_module("pretend").set_rng_state(state)
    assert torch.equal(drawn, act(x))
    assert torch.equal(of_host, torch.get_rng_state())


def test_one_seed_seeds_all_devices(pretend: torch.device) -> None:
    draws = []
    for _ in range(2):
        torch.manual_seed(7)
        draws.append([torch.randn(5, device=f"pretend:{i}").cpu() for i in (0, 1)])
    assert torch.equal(torch.stack(draws[0]), torch.stack(draws[1]))


def test_integers_are_drawn_from_all_there_are(pretend: torch.device) -> None:
    drawn = torch.empty(1000, dtype=torch.int64, device=pretend).random_(-(2**63), None).cpu()
    ones = (drawn[:, None] >> torch.arange(64) & 1).double().mean(0)
    assert ones.min() > 0.4
    assert ones.max() < 0.6


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_draws_the_same_again(pretend: torch.device, reentrant: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).to(pretend)
    x = torch.randn(3, 4, device=pretend, requires_grad=True)
    slopes = []
    for run in (model, lambda x: checkpoint(model, x, use_reentrant=reentrant)):
        torch.manual_seed(3)
        run(x).sum().backward()
        slopes.append(x.grad)
        x.grad = None
    assert torch.equal(*slopes)


# ------------------------------------------------------------ what crosses over

READ = {"to_host": 1, "synchronisations": 1}
CROSSINGS: dict[str, tuple[Act, dict[str, int]]] = {
    "work": (lambda x: (x * 2 + x.mean()).softmax(0).sort().values[0].fill_(1), {}),
    "made there": (lambda x: torch.full((3,), 2.0, device=x.device), {}),
    "number of the host": (lambda x: x * torch.tensor(2.0), {}),
    "fetched": (lambda x: x.cpu(), {"to_host": 1, "bytes_to_host": 24}),
    "fetched in part": (lambda x: x[:, ::2].cpu(), {"to_host": 1, "bytes_to_host": 16}),
    "fetched wider": (lambda x: x.to("cpu", torch.float64), {"to_host": 1, "bytes_to_host": 48}),
    "fetched without waiting": (lambda x: x.to("cpu", non_blocking=True), {"to_host": 1, "bytes_to_host": 24}),
    "listed": (lambda x: x.tolist(), {"to_host": 1, "bytes_to_host": 24}),
    "nothing fetched": (lambda x: x[:0].cpu(), {}),
    "sent": (lambda x: torch.ones(4).to(x.device), {"to_device": 1, "bytes_to_device": 16}),
    "written": (lambda x: torch.ones(2, 3, out=x).copy_(torch.zeros(3)), {"to_device": 1, "bytes_to_device": 24}),
    "made of a list": (lambda x: torch.tensor([1, 2], device=x.device), {"to_device": 1, "bytes_to_device": 16}),
    "passed on": (lambda x: x.to("pretend:1"), {"between": 1, "bytes_between": 24}),
    "number read": (lambda x: x.sum().item(), {**READ, "bytes_to_host": 4}),
    "asked": (lambda x: bool((x > 0).all()), {**READ, "bytes_to_host": 1}),
    "compared": (lambda x: torch.equal(x, x), {**READ, "bytes_to_host": 1}),
    "nearly compared": (lambda x: torch.allclose(x, x), {**READ, "bytes_to_host": 1}),
    "nonzero": (lambda x: x.nonzero(), {"synchronisations": 1}),
    "distinct": (lambda x: x.unique(), {"synchronisations": 1}),
    "selected": (lambda x: x.masked_select(x > 0), {"synchronisations": 1}),
    "mask": (lambda x: x[x > 0], {"synchronisations": 1}),
    "mask put": (lambda x: x.index_put((x > 0,), x.sum()), {"synchronisations": 1}),
    "mask filled": (lambda x: x.masked_fill(x > 0, 1.0), {}),
    "rows": (lambda x: x[torch.zeros(2, dtype=torch.long, device=x.device)], {}),
    "rows by the host": (lambda x: x[torch.tensor([0, 1])], {"to_device": 1, "bytes_to_device": 16}),
    "waited": (lambda x: torch.get_device_module("pretend").synchronize(), {"synchronisations": 1}),
    "waited anyhow": (lambda x: torch.accelerator.synchronize(), {"synchronisations": 1}),
    "drawn": (lambda x: F.dropout(torch.randn_like(x)), {}),
}


@pytest.mark.parametrize("act, crosses", CROSSINGS.values(), ids=CROSSINGS.keys())
def test_what_crosses_is_counted(pretend: torch.device, act: Act, crosses: dict[str, int]) -> None:
    x = torch.ones(2, 3, device=pretend)
    with counting() as crossed:
        act(x)
    x.cpu()  # counted no longer
    assert _nonzero(crossed) == crosses


def test_who_crossed_is_told_also_in_the_threads_of_devices(pretend: torch.device) -> None:
    def culprit(slope: Tensor) -> None:
        slope.sum().item()

    x = torch.ones(3, device=pretend, requires_grad=True)
    y = x * 2
    y.register_hook(culprit)
    with counting(stacks=True) as crossed:
        y.sum().backward()
        x.detach().cpu()
    assert [(c.kind, c.by, c.bytes) for c in crossed.crossings] == [
        ("to_host", "item", 4),
        ("synchronisation", "item", 0),
        ("to_host", "copy", 12),
    ]
    assert [c.stack[-1].name for c in crossed.crossings] == ["culprit"] * 2 + [_name()]


def test_a_model_on_two_devices_trains_as_on_one(pretend: torch.device) -> None:
    first, second, x = nn.Linear(3, 4).double(), nn.Linear(4, 2).double(), torch.randn(5, 3, dtype=torch.float64)
    second(first(x).tanh()).square().sum().backward()
    expected = [p.grad for p in (*first.parameters(), *second.parameters())]
    one, two = copy.deepcopy(first).to(pretend), copy.deepcopy(second).to("pretend:1")
    x = x.to(pretend)
    with counting() as crossed:
        two(one(x).tanh().to("pretend:1")).square().sum().backward()
    assert _nonzero(crossed) == {"between": 2, "bytes_between": 2 * 5 * 4 * 8}
    there = [p.grad for p in (*one.parameters(), *two.parameters())]
    assert [str(g.device) for g in there] == ["pretend:0"] * 2 + ["pretend:1"] * 2
    torch.testing.assert_close([g.cpu() for g in there], expected, rtol=1e-12, atol=1e-12)


COUNTS = [
    *("to_host", "to_device", "between", "synchronisations"),
    *("bytes_to_host", "bytes_to_device", "bytes_between"),
]


def _nonzero(crossed: Crossings) -> dict[str, int]:
    return {name: getattr(crossed, name) for name in COUNTS if getattr(crossed, name)}


def _name() -> str:
    return test_who_crossed_is_told_also_in_the_threads_of_devices.__name__
