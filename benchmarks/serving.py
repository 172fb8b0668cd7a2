"""The service beside the engine it is made of: what HTTP, Serve's proxy and event streams cost.

    python -m benchmarks.serving [--model DIR] [--streams 1,4,8] [--quick]

`ellm-serve serve` runs in a process of its own; a small client on the same machine reads streams.

added_latency: from the moment the engine sampled a token (the server says so before each chunk when
it is asked with X-Ellm-Token-Times) to the moment the client read it. Both are CLOCK_MONOTONIC.

ttft, tpot, itl: as the client sees them, by percentile, for so many streams at once.

ttft_overhead: of a chat that is alone, the time to the first event less the engine's own prefill of
that very prompt, which is what the server's prefill histogram grew by. Whatever makes a prefill
slow or fast is in both; what is left is proxy, template, tokenizer, queue and the way back.
`ttft_per_1000` is what each 1,000 further prompt tokens add to it.

throughput: decoded tokens per second of all rows; the fraction is HTTP over `LLM` in this process
with as many rows. Both take turns if both models fit into memory, else one goes after the other.
Times with a ceiling are held against what they are meant to stay below.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import REPEATS, Report, Result, beside_probe, check_quiet, parser
from benchmarks.event_client import Stream, ask, metric
from ellm_serve.closing import Closing
from ellm_serve.errors import MemoryPlanError
from ellm_serve.llm import LLM
from ellm_serve.model.config import ModelConfig
from ellm_serve.model.hub import resolve_model
from ellm_serve.text.chat_template import ChatTemplate
from ellm_serve.text.tokenizer import Tokenizer

PERCENTILES = (50, 90, 99)
PROMPT = 128  # tokens before a stream begins
SIZES = (500, 1500, 4500)  # of prompts whose first token is timed
ADDED_MS, OVERHEAD_MS, PER_1000_MS = 1.5, 15.0, 1.0
PREFILL = "vllm:request_prefill_time_seconds"
END_S = 60.0


class Prompts:
    """Prompts that no two of begin alike: a server that knows the beginning would not compute it.

    Ordinary words in random order, as token ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._words = sorted(set((__doc__ or "").split()))
        self._rng = np.random.default_rng(0)

    def ids(self, count: int) -> list[int]:
        """So many tokens."""
        words = self._rng.choice(self._words, count + 1)
        return self._tokenizer.encode(" ".join(words))[:count]

    def text(self, count: int) -> str:
        """About so many tokens."""
        return self._tokenizer.decode(self.ids(count))


class Server(Closing):
    """`ellm-serve serve` on a free port."""

    def __init__(self, model: str, flags: Sequence[str]) -> None:
        command = [sys.executable, "-m", "ellm_serve", "serve", "--model", model, "--port", "0"]
        environment = {key: value for key, value in os.environ.items() if key != "RAY_ADDRESS"}
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            [*command, "--access-log", "off", "--drain-timeout", "0", *flags],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._log,
            env=environment,
            text=True,
        )
        try:
            self.url = self._wait()
        except BaseException:
            self.close()
            raise

    def _wait(self) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.startswith("ready: "):
                return line.split()[1].removesuffix("/v1")
        self._log.seek(0)
        raise SystemExit(f"the server did not start:\n{self._log.read().decode()}")

    def close(self) -> None:
        """Ends that process, which ends those it started."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(END_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._log.close()


class Bench:
    """Measures one server."""

    def __init__(self, url: str, report: Report, prompts: Prompts, num_tokens: int) -> None:
        """`num_tokens`: how long an answer is."""
        self._url = url
        self._report = report
        self._prompts = prompts
        self._num_tokens = num_tokens

    def _answer(self) -> dict[str, object]:
        """Fields of a greedy answer of full length."""
        return {"max_tokens": self._num_tokens, "temperature": 0, "ignore_eos": True}

    async def _ask_in_turn(self, rounds: int) -> list[Stream]:
        bodies = [{"prompt": self._prompts.ids(PROMPT), **self._answer()} for _ in range(rounds)]
        return [await ask(self._url, "/v1/completions", body) for body in bodies]

    def streams(self, count: int, rounds: int) -> list[Stream]:
        """The answers of so many clients, each of which asks so many times."""

        async def ask_all() -> list[Stream]:
            each = await asyncio.gather(*(self._ask_in_turn(rounds) for _ in range(count)))
            return list(itertools.chain.from_iterable(each))

        return asyncio.run(ask_all())

    def latency(self, count: int, rounds: int) -> None:
        """What clients see, with so many streams at once."""
        streams = self.streams(count, rounds)
        figures: dict[str, Iterable[float]] = {
            "added_latency": itertools.chain.from_iterable(one.added_s for one in streams),
            "ttft": (one.ttft_s for one in streams),
            "tpot": (one.tpot_s for one in streams),
            "itl": itertools.chain.from_iterable(one.gaps_s for one in streams),
        }
        for name, seconds in figures.items():
            values = np.percentile(list(seconds), PERCENTILES) * 1e3
            for percentile, value in zip(PERCENTILES, values, strict=True):
                ceiling = ADDED_MS if (name, percentile) == ("added_latency", 50) else None
                params = {"streams": count, "percentile": percentile}
                self._report.add(Result(name, params, float(value), "ms", ceiling))

    def throughput(self, rows: int) -> float:
        """Tokens per second that so many streams bring together, after their first ones."""
        return sum(1 / one.tpot_s for one in self.streams(rows, 1))

    def overhead(self, sizes: Sequence[int], repeats: int, chat: bool) -> None:
        """First tokens of prompts of these sizes; sizes take turns."""
        measured = [[self._overhead_s(size, chat) for size in sizes] for _ in range(repeats + 1)]
        medians = [statistics.median(times) * 1e3 for times in zip(*measured[1:], strict=True)]
        for size, value in zip(sizes, medians, strict=True):
            ceiling = OVERHEAD_MS if size == sizes[0] else None
            self._report.add(Result("ttft_overhead", {"tokens": size}, value, "ms", ceiling))
        if len(sizes) > 1:
            slope = (medians[-1] - medians[0]) / (sizes[-1] - sizes[0]) * 1000
            params = {"from": sizes[0], "to": sizes[-1]}
            # Below zero it is noise.
            value = max(slope, 0.0)
            self._report.add(Result("ttft_per_1000", params, value, "ms", PER_1000_MS))

    def _overhead_s(self, size: int, chat: bool) -> float:
        text = self._prompts.text(size)
        path, body = "/v1/completions", {**self._answer(), "max_tokens": 1, "prompt": text}
        if chat:
            path = "/v1/chat/completions"
            body["messages"] = [{"role": "user", "content": body.pop("prompt")}]
        before = self._prefills()
        stream = asyncio.run(ask(self._url, path, body))
        count, seconds = (after - b for after, b in zip(self._prefills(), before, strict=True))
        assert count == 1, "somebody else uses the server"
        return stream.ttft_s - seconds

    def _prefills(self) -> tuple[float, float]:
        """How many there were, and their seconds."""
        return metric(self._url, f"{PREFILL}_count"), metric(self._url, f"{PREFILL}_sum")


def llm_throughput(llm: LLM, prompts: Prompts, rows: int, num_tokens: int) -> float:
    """The same as `Bench.throughput`, in this process."""
    sampling = llm.sampling(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)

    def speed(ids: list[int]) -> float:
        times = [time.monotonic() for _ in llm.stream(ids, sampling)]
        return (num_tokens - 1) / (times[-1] - times[0])

    with ThreadPoolExecutor(rows) as readers:
        return sum(readers.map(speed, [prompts.ids(PROMPT) for _ in range(rows)]))


def _compare(server: Server, bench: Bench, given: argparse.Namespace, prompts: Prompts) -> Result:
    """Decoding through HTTP and without it; ends the server if there is no room for both."""
    rows, repeats = max(given.streams), given.repeats
    options = _engine_options(given)

    def probe(llm: LLM) -> float:
        return llm_throughput(llm, prompts, rows, given.tokens)

    try:
        with LLM(given.model, **options) as llm:
            speeds = beside_probe(lambda: bench.throughput(rows), lambda: probe(llm), repeats)
        turns = "taken"
    except MemoryPlanError:
        http = statistics.median([bench.throughput(rows) for _ in range(repeats + 1)][1:])
        server.close()
        with LLM(given.model, **options) as llm:
            alone = statistics.median([probe(llm) for _ in range(repeats + 1)][1:])
        speeds, turns = (http, alone), "none"
    return Result("throughput", {"rows": rows, "turns": turns}, speeds[0], "tok/s", speeds[1])


def _engine_options(given: argparse.Namespace) -> dict[str, Any]:
    """Of the engine behind HTTP and of the one in process."""
    length = max(PROMPT + given.tokens, *given.sizes) + 64
    threads = {} if given.threads is None else {"threads": given.threads}
    return {"sequence_length": length, "batch_size": max(given.streams), **threads}


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    options = parser(__doc__ or "")
    options.add_argument("--model", default="builtin", help="directory, hub id or builtin")
    options.add_argument(
        "--streams", type=lambda text: [int(part) for part in text.split(",")], default=[1, 4, 8]
    )
    options.add_argument("--tokens", type=int, default=128, help="of each answer")
    options.add_argument("--threads", type=int, help="compute threads; all cores")
    given = options.parse_args(arguments)
    given.sizes, given.rounds, given.repeats = SIZES, 4, REPEATS
    if given.quick:
        given.sizes, given.rounds, given.repeats = (SIZES[0], SIZES[-1]), 2, 3
    return given


def _fitting(sizes: Sequence[int], model: Path) -> tuple[int, ...]:
    """Those that the model was trained for, with room for a template."""
    longest = ModelConfig.from_dir(model).max_position_embeddings - 64
    return tuple(size for size in sizes if size <= longest) or (longest,)


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the benchmark."""
    given = _options(arguments)
    check_quiet()
    model = resolve_model(given.model)
    given.sizes = _fitting(given.sizes, model)
    prompts = Prompts(Tokenizer.from_dir(model))
    report = Report("serving", {"model": model.name, "tokens": given.tokens})
    flags = [
        f"--{name.replace('_', '-')}={value}" for name, value in _engine_options(given).items()
    ]
    with Server(given.model, flags) as server:
        bench = Bench(server.url, report, prompts, given.tokens)
        bench.streams(max(given.streams), 1)
        for count in given.streams:
            bench.latency(count, given.rounds)
        bench.overhead(given.sizes, given.repeats, ChatTemplate.from_dir(model) is not None)
        report.add(_compare(server, bench, given, prompts))
    report.finish()


if __name__ == "__main__":
    main()
