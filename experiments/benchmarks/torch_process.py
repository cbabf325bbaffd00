"""PyTorch in a process of its own: a loop by hand, the same one compiled, and Lightning; one process for each device.

    echo 100 | python -m experiments.benchmarks.torch_process lightning tiny 1

Each line of input is a number of steps; each line of output, the seconds that they took. `peers` creates the
environment and starts this process, which starts the others.
"""

import itertools
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

import lightning
import numpy as np
import torch
from torch import distributed, nn

from experiments.benchmarks import turns, workloads

LOG_EVERY = 100  # steps after which the host reads loss and accuracy


class Block(nn.Module):
    """A layer of the transformer."""

    def __init__(self, width: int, heads: int):
        super().__init__()
        self._heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width, eps=1e-3) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.ReLU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.qkv(self.norms[0](x)).unflatten(-1, (3, self._heads, -1))
        split = heads.permute(2, 0, 3, 1, 4)  # [3, B, heads, T, width / heads]
        mixed = nn.functional.scaled_dot_product_attention(*split, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norms[1](x))


def make_mlp(widths: list[int]) -> nn.Module:
    layers = [layer for a, b in itertools.pairwise(widths) for layer in (nn.Linear(a, b), nn.ReLU())]
    return nn.Sequential(*layers[:-1])


def make_convnet() -> nn.Module:
    convolutions = [layer for a, b in ((1, 32), (32, 64)) for layer in (nn.Conv2d(a, b, 3), nn.ReLU(), nn.MaxPool2d(2))]
    return nn.Sequential(*convolutions, nn.Flatten(), nn.Linear(5 * 5 * 64, 10))


def make_transformer(length: int, width: int, heads: int, depth: int, vocabulary: int) -> nn.Module:
    blocks = [Block(width, heads) for _ in range(depth)]
    last = nn.LayerNorm(width, eps=1e-3), nn.Linear(width, vocabulary)
    return nn.Sequential(nn.Embedding(vocabulary, width), *blocks, *last)


def make_resnet50() -> nn.Module:
    import torchvision

    return torchvision.models.resnet50()


MODELS = {
    "tiny": lambda: make_mlp([16, 32, 10]),
    "deep": lambda: make_mlp([16, *[32] * 19, 10]),
    "conv": make_convnet,
    "lm": lambda: make_transformer(**workloads.SMALL_LM),
    "lm70m": lambda: make_transformer(**workloads.LARGE_LM),
    "resnet50": make_resnet50,
}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if DEVICE == "cuda":
    torch.set_float32_matmul_precision("high")  # TF32, as TensorFlow and JAX do by default


class Batches(torch.utils.data.IterableDataset):
    """Batches of a rank's rows, without end."""

    def __init__(self, workload: workloads.Workload, rank: int, ranks: int):
        size = workload.global_batch_size(ranks)
        features, labels = workload.make_rows(np.random.default_rng(0), size * workload.num_batches)
        features = features.transpose(0, 3, 1, 2) if features.ndim == 4 else features  # channels first
        rows = [torch.from_numpy(np.ascontiguousarray(features)), torch.from_numpy(labels.astype(np.int64))]
        rows = [array.pin_memory() for array in rows] if DEVICE == "cuda" else rows
        starts = range(rank * size // ranks, len(labels), size)
        self._batches = [[array[i : i + size // ranks] for array in rows] for i in starts]

    def __iter__(self) -> Iterator[list[torch.Tensor]]:
        return itertools.cycle(self._batches)


def measured(model: nn.Module, features: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the mean loss and accuracy."""
    logits = model(features)
    loss = nn.functional.cross_entropy(logits.flatten(0, -2), labels.flatten())
    return loss, (logits.detach().argmax(-1) == labels).float().mean()


class Loop(turns.System):
    """The usual loop; the host reads loss and accuracy every LOG_EVERY steps."""

    def __init__(self, model: nn.Module, batches: Batches, is_compiled: bool):
        self._model = nn.parallel.DistributedDataParallel(model) if distributed.is_initialized() else model
        self._measured: Callable = torch.compile(measured) if is_compiled else measured
        self._optimizer = torch.optim.Adam(model.parameters(), workloads.LEARNING_RATE)
        self._batches = iter(batches)

    def call(self, steps: int) -> None:
        sums = [0.0, 0.0]
        for done in range(1, steps + 1):
            batch = [array.to(DEVICE, non_blocking=True) for array in next(self._batches)]
            values = self._measured(self._model, *batch)
            self._optimizer.zero_grad()
            values[0].backward()
            self._optimizer.step()
            sums = [a + b.detach() for a, b in zip(sums, values, strict=True)]
            if done % LOG_EVERY == 0 or done == steps:
                sums = [float(a) for a in sums]


class Module(lightning.LightningModule):
    """The module of Lightning's guide."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def training_step(self, batch: list[torch.Tensor], index: int) -> torch.Tensor:
        loss, accuracy = measured(self.model, *batch)
        self.log_dict({"loss": loss, "accuracy": accuracy})
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), workloads.LEARNING_RATE)


class Marks(lightning.Callback):
    """Records when the first step begins and when the last one has ended."""

    start = end = 0.0

    def on_train_batch_start(self, *_: object) -> None:
        self.start = self.start or time.perf_counter()

    def on_train_batch_end(self, *_: object) -> None:
        self.end = time.perf_counter()


class Fit(turns.System):
    """`lightning.Trainer.fit`, one call at a time, with a logger and without its progress bar and checkpoints."""

    def __init__(self, model: nn.Module, batches: Batches, ranks: int):
        self._module, self._ranks, self._directory = Module(model), ranks, tempfile.TemporaryDirectory()
        self._batches = torch.utils.data.DataLoader(batches, batch_size=None)

    def call(self, steps: int) -> None:
        self.steps_secs(steps)

    def steps_secs(self, steps: int) -> float:
        marks = Marks()
        trainer = lightning.Trainer(
            accelerator="auto",
            devices=self._ranks,
            strategy="ddp" if self._ranks > 1 else "auto",
            max_steps=steps,
            log_every_n_steps=LOG_EVERY,
            logger=lightning.pytorch.loggers.CSVLogger(self._directory.name),
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            callbacks=[marks],
        )
        trainer.fit(self._module, self._batches)
        return marks.end - marks.start


def run(name: str, workload: str, ranks: int, asked: Iterator[int], answer: Callable[[float], None]) -> None:
    """Trains for as many steps as is asked, and answers with the seconds; the first rank tells the others."""
    rank = int(os.environ.get("RANK", "0"))
    if ranks > 1:
        distributed.init_process_group("gloo", rank=rank, world_size=ranks)
        torch.set_num_threads(max(1, torch.get_num_threads() // ranks))
    batches, model = Batches(workloads.EVERY[workload], rank, ranks), MODELS[workload]().to(DEVICE)
    system = Fit(model, batches, ranks) if name == "lightning" else Loop(model, batches, name == "torch_compiled")
    while True:
        steps = torch.tensor(next(asked, 0) if rank == 0 else 0)
        if ranks > 1:
            distributed.broadcast(steps, 0)
        if not steps:
            return
        answer(system.steps_secs(int(steps)))


def main(name: str, workload: str, ranks: str) -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    sys.stdout = open(os.devnull, "w")
    with socket.socket() as free:
        free.bind(("localhost", 0))
        address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free.getsockname()[1]), "WORLD_SIZE": ranks}
    is_first = "RANK" not in os.environ
    if is_first and int(ranks) > 1:
        os.environ.update(address, RANK="0", LOCAL_RANK="0")
        for rank in range(1, int(ranks)):
            variables = {**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            command = [sys.executable, "-m", __spec__.name, *sys.argv[1:]]
            subprocess.Popen(command, env=variables, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    run(name, workload, int(ranks), map(int, sys.stdin), lambda secs: print(secs, file=answers, flush=True))


if __name__ == "__main__":
    main(*sys.argv[1:])
