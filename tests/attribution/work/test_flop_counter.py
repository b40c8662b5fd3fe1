"""FLOP of ten programs beside torch's counter, on the CPU; attention, which it leaves out there, by closed forms."""

from __future__ import annotations

from typing import Any

import pytest

from thence.attribution.work.flop import FLOP
from thence.attribution.work.operands import arguments_of
from thence.capture.marks.captured_calls import CapturedCalls

torch = pytest.importorskip("torch")
nn, functional = torch.nn, torch.nn.functional

BATCH, LENGTH, WIDTH, HEADS = 2, 13, 24, 4


def counted(program: Any) -> tuple[float, float, float]:
    """FLOP of products and convolutions by thence and by torch's counter, and of attention by thence."""
    from torch.utils.flop_counter import FlopCounterMode

    calls: list[tuple[str, str]] = []

    def begun(name: str, inputs: str, _node: int | None, _backward: bool) -> Any:
        calls.append((name, inputs))
        return lambda: None

    captured = CapturedCalls(torch, begun)
    captured.enter()
    try:
        program()
    finally:
        captured.leave()
    with FlopCounterMode(display=False) as counter:
        program()
    flop: dict[bool, float] = {False: 0.0, True: 0.0}
    for name, inputs in calls:
        if name in FLOP:
            found = FLOP[name](arguments_of(inputs) or ())
            assert found is not None, (name, inputs)
            flop["attention" in name] += found
    theirs = counter.get_flop_counts()["Global"].items()  # from PyTorch 2.15 on with attention, causal or not
    return flop[False], sum(count for op, count in theirs if "attention" not in str(op)), flop[True]


class Attention(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, kv_heads: int = HEADS, *, causal: bool = True) -> None:
        super().__init__()
        self.kv_heads, self.causal, size = kv_heads, causal, WIDTH // HEADS
        self.q, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.kv = nn.Linear(WIDTH, 2 * kv_heads * size)

    def forward(self, x: Any) -> Any:
        def heads(y: Any, count: int) -> Any:
            return y.unflatten(-1, (count, -1)).transpose(1, 2)

        k, v = self.kv(x).chunk(2, -1)
        q, k, v = heads(self.q(x), HEADS), heads(k, self.kv_heads), heads(v, self.kv_heads)
        grouped = self.kv_heads != HEADS
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal, enable_gqa=grouped)
        return self.out(y.transpose(1, 2).flatten(2))


def scores(length: int, *, causal: bool) -> float:
    """Attention forward and backward by the closed form."""
    pairs = length * (length + 1) // 2 if causal else length * length
    return 3.5 * 4 * BATCH * pairs * WIDTH


class Block(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, attention: Any, mlp: Any) -> None:
        super().__init__()
        self.attention, self.mlp, self.norm = attention, mlp, nn.LayerNorm(WIDTH)

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(x)


def dense() -> Any:
    return nn.Sequential(nn.Linear(WIDTH, 50), nn.GELU(), nn.Linear(50, WIDTH))


class Gated(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(WIDTH, 40), nn.Linear(WIDTH, 40), nn.Linear(40, WIDTH)

    def forward(self, x: Any) -> Any:
        return self.down(functional.silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):  # type: ignore[misc, name-defined]
    """Each token goes to the expert with the largest weight."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(dense() for _ in range(3))

    def forward(self, x: Any) -> Any:
        flat = x.flatten(0, 1)
        chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for number, expert in enumerate(self.experts):
            rows = (chosen.indices == number).nonzero().squeeze(-1)
            out = out.index_add(0, rows, expert(flat[rows]) * chosen.values[rows, None])
        return out.view_as(x)


def language_model(*blocks: Any) -> Any:
    model = nn.Sequential(nn.Embedding(31, WIDTH), *blocks, nn.Linear(WIDTH, 31))
    words = torch.randint(0, 31, (BATCH, LENGTH))
    return lambda: functional.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()


def residual(inside: int, outside: int, stride: int) -> Any:
    return nn.Sequential(
        nn.Conv2d(inside, outside, 3, stride, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU(),
        nn.Conv2d(outside, outside, 3, 1, 1, bias=False), nn.BatchNorm2d(outside),
    )  # fmt: skip


def image_model(*layers: Any, channels: int = 3, size: int = 17) -> Any:
    model, x = nn.Sequential(*layers), torch.randn(BATCH, channels, size, size)
    return lambda: model(x).square().mean().backward()


class UNet(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.first, self.down = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(6, 12, 4, 2, 1)
        self.up, self.last = nn.ConvTranspose2d(12, 6, 4, 2, 1), nn.Conv2d(12, 2, 1)

    def forward(self, x: Any) -> Any:
        first = self.first(x).relu()
        return self.last(torch.cat([first, self.up(self.down(first).relu())], 1))


class Patches(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, WIDTH, 4, 4)

    def forward(self, x: Any) -> Any:
        return self.cut(x).flatten(2).transpose(1, 2)


class Checkpointed(nn.Module):  # type: ignore[misc, name-defined]
    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Any) -> Any:
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)


def recurrent() -> Any:
    layer, x = nn.LSTM(WIDTH, 10, num_layers=2, bidirectional=True), torch.randn(LENGTH, BATCH, WIDTH)

    def step() -> None:
        with torch.backends.mkldnn.flags(enabled=False):  # whose operator the counter does not know
            layer(x)[0].sum().backward()

    return step


def volumes() -> Any:
    layer, x = nn.Conv3d(4, 6, 3, stride=2, padding=1), torch.randn(BATCH, 4, 9, 8, 7)
    return lambda: layer(x).sum().backward()


def sequences() -> Any:
    layer, x = nn.Conv1d(8, 12, 5, stride=3, padding=4, dilation=2, groups=4), torch.randn(BATCH, 8, 29)

    def forward() -> None:
        with torch.no_grad():
            layer(x)

    return forward


PROGRAMS: dict[str, tuple[Any, float]] = {
    "gpt": (lambda: language_model(Block(Attention(), dense())), scores(LENGTH, causal=True)),
    "llama": (lambda: language_model(Block(Attention(2), Gated())), scores(LENGTH, causal=True)),
    "moe": (lambda: language_model(Block(Attention(), Experts())), scores(LENGTH, causal=True)),
    "vit": (lambda: image_model(Patches(), Block(Attention(causal=False), dense()), size=16), scores(16, causal=False)),
    "resnet": (lambda: image_model(nn.Conv2d(3, 8, 7, 2, 3), residual(8, 8, 1), residual(8, 16, 2)), 0),
    "unet": (lambda: image_model(UNet(), size=16), 0),
    "lstm": (recurrent, 0),
    "conv1d": (sequences, 0),
    "conv3d": (volumes, 0),
    "checkpoints": (
        lambda: language_model(Checkpointed(Block(Attention(), dense())), Checkpointed(dense())),
        scores(LENGTH, causal=True) * 4.5 / 3.5,
    ),
}


@pytest.mark.filterwarnings("ignore:.*mkldnn.*")
@pytest.mark.filterwarnings("ignore::UserWarning:torch.backends.mkldnn")
@pytest.mark.parametrize("name", PROGRAMS)
def test_flop_are_those_of_the_counter(name: str) -> None:
    torch.manual_seed(0)
    make, attention = PROGRAMS[name]
    ours, theirs, ours_of_attention = counted(make())
    assert ours == theirs > 0
    assert ours_of_attention == attention


def test_gradients_of_a_grouped_convolution_by_hand() -> None:
    """Each of 12 outputs sees 2 of 8 inputs; the counter leaves the groups out in one of the two gradients."""
    layer, x = nn.Conv1d(8, 12, 5, stride=3, padding=4, dilation=2, groups=4), torch.randn(BATCH, 8, 29)
    x.requires_grad_()
    ours, _, _ = counted(lambda: layer(x).sum().backward())
    positions = len(range(0, 29 + 2 * 4 - 2 * 4, 3))
    assert ours == 3 * 2 * BATCH * positions * 12 * 2 * 5


def test_a_recurrent_layer_of_cudnn_by_hand() -> None:
    """Two layers, both directions, 10 units of 4 gates: each step meets the matrices of input and state."""
    from thence.attribution.work.operands import Tensor

    shapes = [(40, WIDTH), (40, 10), (40,), (40,)] * 2 + [(40, 20), (40, 10), (40,), (40,)] * 2
    weights = tuple(Tensor(shape) for shape in shapes)
    forward = 2 * LENGTH * BATCH * 40 * 2 * ((WIDTH + 10) + (20 + 10))
    given = (Tensor((LENGTH, BATCH, WIDTH), "float"), weights)
    assert FLOP["aten::_cudnn_rnn"](given) == forward
    assert FLOP["aten::_cudnn_rnn_backward"](given) == 2 * forward
    assert FLOP["aten::_cudnn_rnn"]((given[0], ())) is None, "weights that were not recorded"


@pytest.mark.parametrize("name", [name for name in FLOP if "attention" in name and name.startswith("aten::")])
def test_attention_finds_its_arguments_where_the_schema_has_them(name: str) -> None:
    """Two sequences, six heads of queries that share three of keys: 5 queries, 7 keys, widths 8 and 16."""
    from thence.attribution.work.operands import Argument, Tensor

    arguments = [argument.name for argument in torch._C._jit_get_schemas_for_operator(name)[0].arguments]
    flag = "is_causal" if "is_causal" in arguments else "custom_mask_type"
    raw = not name.startswith("aten::_scaled") and "cudnn" not in name  # flash-attn's own layout

    def flop(causal: str) -> float | None:
        sizes = dict.fromkeys(("query", "q"), (6, 5, 8)) | dict.fromkeys(("key", "k"), (3, 7, 8))
        sizes |= dict.fromkeys(("value", "v"), (3, 7, 16))
        given: list[Argument] = [causal if argument == flag else None for argument in arguments]
        for argument, (heads, length, width) in sizes.items():
            if argument in arguments:
                shape = (2, length, heads, width) if raw else (2, heads, length, width)
                given[arguments.index(argument)] = Tensor(shape, "c10::BFloat16")
        return FLOP[name](given)

    times = 2.5 if name.endswith("backward") else 1
    pair = 2 * 2 * 6 * (8 + 16) * times
    causal = 3 + 4 + 5 + 6 + 7 if "_flash_attention_" in name and raw else 1 + 2 + 3 + 4 + 5
    yes, no = ("True", "False") if flag == "is_causal" else ("1", "0")
    assert (flop(no), flop(yes)) == (5 * 7 * pair, causal * pair)
