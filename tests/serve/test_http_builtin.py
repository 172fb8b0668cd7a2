"""The built-in model over HTTP says what it says in process, alone and in company."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from ellm_serve.llm import LLM
from tests.serve.conftest import Server

PROMPTS = [
    "def fibonacci(n):",
    "The capital of",
    "import os\n",
    "Once upon a time",
    "class Stack:\n    def push(self",
    "for i in range(",
    "# TODO",
    "A short answer is",
]


def over_http(server: Server, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": 24, "temperature": 0}
    text: str = server.client.post("/v1/completions", body).json["choices"][0]["text"]
    return text


def test_greedy_text(builtin_server: tuple[Server, LLM]) -> None:
    """Equal to `LLM.generate`, also when eight clients ask at once."""
    server, llm = builtin_server
    answers = llm.generate(PROMPTS, llm.sampling(max_tokens=24, temperature=0.0))
    expected = [answer.text for answer in answers]
    assert [over_http(server, prompt) for prompt in PROMPTS] == expected
    with ThreadPoolExecutor(len(PROMPTS)) as clients:
        together = list(clients.map(lambda prompt: over_http(server, prompt), PROMPTS * 2))
    assert together == expected * 2
