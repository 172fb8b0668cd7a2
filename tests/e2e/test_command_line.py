"""The verbs a user types, as processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from ellm_serve import LLM


def ellm_serve(*arguments: str, text: str = "") -> subprocess.CompletedProcess[str]:
    """Runs `ellm-serve` in a process of its own."""
    command = [sys.executable, "-m", "ellm_serve", *arguments]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=300)


def test_generate(llm: LLM) -> None:
    """Standard output is the text that `LLM` gives, standard error the figures."""
    ran = ellm_serve(
        "generate", "--model", "builtin", "--prompt", "def fibonacci(n):", "--max-tokens", "40",
        "--temperature", "0",
    )  # fmt: skip
    expected = llm.generate("def fibonacci(n):", llm.sampling(max_tokens=40, temperature=0))[0]
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout == expected.text + "\n"
    assert f"{expected.usage.num_output_tokens} generated" in ran.stderr


def test_chat_reuses_its_session() -> None:
    """The second answer's figures show cached tokens; /reset and end of input work."""
    questions = "What does len do?\nAnd sorted?\n/reset\nHello!\n"
    ran = ellm_serve("chat", "--temperature", "0", "--max-tokens", "12", text=questions)
    assert ran.returncode == 0, ran.stderr
    figures = [line for line in ran.stderr.splitlines() if "prompt tokens cached" in line]
    cached = [int(line.split()[0].lstrip("[")) for line in figures]
    assert len(cached) == 3
    assert cached[0] == 0 < cached[1]


def test_mistakes_are_one_line(tmp_path: Path) -> None:
    """A start-up mistake has no traceback and exit code 1."""
    for arguments, words in (
        (("generate", "--model", str(tmp_path), "--prompt", "x"), "config.json"),
        (("generate", "--sequence-length", "9000", "--prompt", "x"), "9000"),
        (("chat", "--threads", "4096"), "4096"),
    ):
        ran = ellm_serve(*arguments)
        assert ran.returncode == 1
        assert len(ran.stderr.strip().splitlines()) == 1, ran.stderr
        assert words in ran.stderr


def test_bad_sampling_value_is_one_line() -> None:
    """A value out of range is the user's mistake as well."""
    ran = ellm_serve("generate", "--prompt", "x", "--top-p", "0")
    assert ran.returncode == 1
    assert "top_p" in ran.stderr and "Traceback" not in ran.stderr
