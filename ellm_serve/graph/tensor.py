"""Activations: what they are called, how wide a row is, and where they lie in an arena.

A program runs in one of two modes with an arena each: FEW rows (decode; small tensors exist once
per thread, so that threads need not wait for each other) and MANY rows (a prefill block; everything
is shared). A tensor is the same in both, its buffer is not.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from ellm_kernels.tiles import padded
from ellm_serve.model.region import round_up

_LINE = 64


class Mode(Enum):
    """How a program is run."""

    FEW = "few"
    MANY = "many"


class Per(Enum):
    """What a tensor has one row for."""

    ROW = "row"  # every row of a step
    LOGIT_ROW = "logit row"  # every row whose logits are wanted
    STEP = "step"  # the step as a whole
    THREAD = "thread"  # scratch


@dataclass(frozen=True, slots=True)
class Tensor:
    """One activation. `row_bytes` is the distance of two rows; `local`: per thread in FEW mode."""

    name: str
    row_bytes: int
    per: Per = Per.ROW
    local: bool = False
    only: Mode | None = None


def f32_rows(name: str, width: int, per: Per = Per.ROW, local: bool = False) -> Tensor:
    """float32 rows as wide as whole panels."""
    return Tensor(name, 4 * padded(width), per, local)


def bf16_rows(
    name: str, width: int, per: Per = Per.ROW, local: bool = False, only: Mode | None = None
) -> Tensor:
    """bf16 rows of exactly this width."""
    return Tensor(name, 2 * width, per, local, only)


@dataclass(frozen=True, slots=True)
class Buffer:
    """A tensor's place in an arena: `private` bytes lie between two threads' copies (0: shared)."""

    address: int
    row_bytes: int
    private: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """Shares of a tensor: socket i's lies `i · stride` bytes behind `base`."""

    base: int = 0
    stride: int = 0
    rank: int = 0
    count: int = 1


class Arena:
    """Lays tensors out one behind the other; the address is added once memory exists."""

    def __init__(
        self, mode: Mode, num_rows: int, num_logit_rows: int, num_threads: int, base: int = 0
    ) -> None:
        self.mode = mode
        self.num_rows = num_rows
        self.num_logit_rows = num_logit_rows
        self.num_threads = num_threads
        self._base = base
        self._buffers: dict[str, Buffer] = {}
        self._exchanges: dict[str, Exchange] = {}
        self.size_bytes = 0

    def add(self, tensor: Tensor) -> None:
        """Makes room for a tensor."""
        if tensor.only not in (None, self.mode):
            return
        rows = {Per.ROW: self.num_rows, Per.LOGIT_ROW: self.num_logit_rows}.get(tensor.per, 1)
        local = tensor.per is Per.THREAD or (tensor.local and self.mode is Mode.FEW)
        one = round_up(tensor.row_bytes * rows, _LINE)
        total = one * (self.num_threads if local else 1)
        self._buffers[tensor.name] = Buffer(
            self._base + self.size_bytes, tensor.row_bytes, one if local else 0, total
        )
        # A gap of a line keeps the prefetch of one tensor's end out of the next one's start.
        self.size_bytes = round_up(self.size_bytes + total + _LINE, 4096)

    def share(self, tensor: Tensor, exchange: Exchange) -> None:
        """Places a tensor of which every socket has a share, in memory that all of them see."""
        address = exchange.base + exchange.rank * exchange.stride
        rows = self.num_logit_rows if tensor.per is Per.LOGIT_ROW else self.num_rows
        size = tensor.row_bytes * rows
        self._buffers[tensor.name] = Buffer(address, tensor.row_bytes, 0, size)
        self._exchanges[tensor.name] = exchange

    def exchange(self, tensor: Tensor) -> Exchange:
        """Where the shares of a shared tensor lie."""
        return self._exchanges[tensor.name]

    def __getitem__(self, tensor: Tensor) -> Buffer:
        return self._buffers[tensor.name]

    def buffers(self) -> dict[str, Buffer]:
        """Every buffer by its tensor's name."""
        return dict(self._buffers)
