"""What the built-in model says in process, for comparison with what clients read."""

from __future__ import annotations

from ellm_serve.llm import LLM, Completion
from ellm_serve.request import SamplingParams

MAX_TOKENS = 24
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
QUESTIONS = [
    "Hello",
    "How do I read a file in Python?",
    "What is a list?",
    "Thank you!",
    "Write a function that adds two numbers.",
    "¿Qué es esto? 🙂",
    "Who are you?",
    "1 + 1",
]


def user(question: str) -> list[dict[str, str]]:
    """A conversation of one message."""
    return [{"role": "user", "content": question}]


def greedy(llm: LLM) -> SamplingParams:
    return llm.sampling(max_tokens=MAX_TOKENS, temperature=0.0)


def generated(llm: LLM, prompt: str) -> str:
    """The greedy continuation."""
    return llm.generate(prompt, greedy(llm))[0].text


def answer(llm: LLM, question: str) -> Completion:
    """The greedy answer."""
    return llm.chat(user(question), greedy(llm))


def answered(llm: LLM, question: str) -> str:
    """Its text."""
    return answer(llm, question).text
