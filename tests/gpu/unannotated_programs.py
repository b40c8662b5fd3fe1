"""Programs that nobody annotated, recorded by unannotated.py to see how much of their GPU time is known.

python tests/gpu/unannotated_programs.py NAME
"""

from __future__ import annotations

import os
from typing import Any

from support import documented_parser

if __name__ == "__main__":
    OPTIONS = documented_parser(__doc__)
    OPTIONS.add_argument("name", metavar="NAME", help="a function of this file")
    GIVEN = OPTIONS.parse_args()

import torch
from torch import nn
from torch.nn import functional

STEPS = 5


def llama(layers: int = 8) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=1024,
        intermediate_size=2816,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=2048,
    )
    return LlamaForCausalLM(config).to("cuda", torch.bfloat16)


def tokens() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randint(0, 32000, (4, 64)).to("cuda")


def llama_train(model: Any = None) -> None:
    model = llama() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    for _ in range(STEPS):
        ids = tokens()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def llama_checkpointed() -> None:
    model = llama(4)
    model.gradient_checkpointing_enable()
    model.train()
    llama_train(model)


def llama_decode() -> None:
    model, ids = llama(), tokens()
    with torch.no_grad():
        model.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False, pad_token_id=0)


def llama_compiled() -> None:
    llama_train(torch.compile(llama(4)))


def resnet_amp() -> None:
    from torchvision.models import resnet50

    model = resnet50().cuda()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cuda")
    images = torch.utils.data.TensorDataset(torch.randn(64, 3, 96, 96), torch.randint(0, 1000, (64,)))
    loader = torch.utils.data.DataLoader(images, 16, num_workers=1, pin_memory=True)
    criterion = nn.CrossEntropyLoss()
    for _ in range(2):
        for image, label in loader:
            x, y = image.cuda(non_blocking=True), label.cuda(non_blocking=True)
            with torch.autocast("cuda", torch.float16):
                loss = criterion(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def lightning() -> None:
    import lightning as L  # noqa: N812 - as its users write

    class Task(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))

        def training_step(self, batch: Any, _index: int) -> torch.Tensor:
            x, y = batch
            return functional.cross_entropy(self.net(x), y)

        def configure_optimizers(self) -> Any:
            return torch.optim.Adam(self.parameters())

    data = torch.utils.data.TensorDataset(torch.randn(256, 64), torch.randint(0, 10, (256,)))
    trainer = L.Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    trainer.fit(Task(), torch.utils.data.DataLoader(data, 32))


def geometric() -> None:
    from torch_geometric.nn import GCNConv

    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = GCNConv(32, 64), GCNConv(64, 8)

        def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x, edges).relu(), edges)

    model = Graph().cuda()
    optimizer = torch.optim.Adam(model.parameters())
    x, edges = torch.randn(1000, 32).cuda(), torch.randint(0, 1000, (2, 5000)).cuda()
    y = torch.randint(0, 8, (1000,)).cuda()
    for _ in range(STEPS):
        optimizer.zero_grad()
        functional.cross_entropy(model(x, edges), y).backward()
        optimizer.step()


def accelerate() -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10))
    data = torch.utils.data.TensorDataset(torch.randn(256, 64), torch.randint(0, 10, (256,)))
    loader = torch.utils.data.DataLoader(data, 32)
    model, optimizer, loader = accelerator.prepare(net, torch.optim.AdamW(net.parameters()), loader)
    for x, y in loader:
        with accelerator.accumulate(model):
            loss = functional.cross_entropy(model(x), y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


def fsdp2() -> None:
    from torch.distributed.fsdp import fully_shard

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl")
    model = llama(4)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    llama_train(model)
    torch.distributed.destroy_process_group()


def cupy() -> None:
    import cupy as cp

    a = cp.random.rand(512, 512)
    double = cp.ElementwiseKernel("float64 x", "float64 y", "y = 2 * x", "double_it")
    for _ in range(STEPS):
        b = a @ a
        c = double(b)
        cp.cuda.Device().synchronize()
        a = c / c.sum()


def triton() -> None:
    import triton
    from triton import language as tl

    @triton.jit
    def scale(x, y, n, size: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * size + tl.arange(0, size)
        tl.store(y + at, 2 * tl.load(x + at, mask=at < n), mask=at < n)

    x = torch.randn(10_000, device="cuda")
    y = torch.empty_like(x)
    for _ in range(STEPS):
        scale[(triton.cdiv(x.numel(), 256),)](x, y, x.numel(), 256)
        x = y.sin()


PROGRAMS = {
    one.__name__: one
    for one in (
        *(llama_train, llama_checkpointed, llama_decode, llama_compiled, resnet_amp, lightning),
        *(geometric, accelerate, fsdp2, cupy, triton),
    )
}


if __name__ == "__main__":
    PROGRAMS[GIVEN.name]()
    torch.cuda.synchronize()
