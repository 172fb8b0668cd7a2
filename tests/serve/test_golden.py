"""Replays recorded requests of a real vLLM over HTTP and compares the answers field by field."""

from __future__ import annotations

import http.client
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from ellm_serve.serve.context import AppState
from ellm_serve.serve.http import create_app
from tests.serve.conftest import serving
from tests.serve.golden_answers import DIFFERENCES, Recorded, differences, recorded, shape
from tests.serve.scripted import Harness, harness

RECORDED = recorded()
# Recorded from a second server, which told no details of usage and took thoughts out of answers;
# some of it with a key.
SECOND = ("auth_", "hermes", "reason", "noptd", "nodev_", "anth_reason")


class Answer:
    """Ours to one recorded request."""

    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.content_type = response.getheader("content-type", "")
        self.body = response.read().decode()


@contextmanager
def replaying(**changes: Any) -> Iterator[tuple[Harness, str]]:
    """A scripted service behind HTTP."""
    with harness(**changes) as scripted:
        state = AppState(scripted.metrics, service=scripted.service, phase="ready")
        with serving(create_app(state, scripted.config)) as url:
            yield scripted, url


def ask(scripted: Harness, url: str, row: Recorded) -> Answer:
    """Sends a recorded request; the model says what the recorded one was made to say."""
    scripted.script.say(row.forced_ids)
    headers = dict(row.request_headers)
    if row.request is not None:
        headers.setdefault("content-type", "application/json")
    connection = http.client.HTTPConnection(url.removeprefix("http://"), timeout=60)
    try:
        connection.request(row.method, row.path, row.request_body, headers)
        return Answer(connection.getresponse())
    finally:
        connection.close()


@pytest.fixture(scope="module")
def answers() -> dict[str, Answer]:
    """Ours to all of them, in the recorded order."""
    plain: dict[str, Any] = {
        "enable_prompt_tokens_details": False,
        "tool_call_parser": "hermes",
        "reasoning_parser": "qwen3",
    }
    with (
        replaying(tool_call_parser="qwen3_coder") as first,
        replaying(**plain) as second,
        replaying(**plain, api_keys=("sekret",)) as locked,
    ):
        found = {}
        for row in RECORDED:
            server = locked if row.name.startswith("auth_") else second
            found[row.name] = ask(*(server if row.name.startswith(SECOND) else first), row)
        return found


def differing(row: Recorded, answer: Answer) -> list[str]:
    """The fields of our answer that are not as recorded; `status` and `content-type` are two."""
    if answer.status != row.status:
        return ["status"]
    recorded_type = row.headers.get("content-type", "")
    found = [] if answer.content_type == recorded_type else ["content-type"]
    ours, theirs = (
        shape(body, recorded_type, bool(row.forced_ids)) for body in (answer.body, row.body)
    )
    return found + differences(ours, theirs)


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: row.name)
def test_answer_is_as_recorded(row: Recorded, answers: dict[str, Answer]) -> None:
    """Status, kind of content and every field, but for what the table accepts."""
    answer = answers[row.name]
    for field in differing(row, answer):
        entries = [one for one in DIFFERENCES if one.covers(row.name, field)]
        assert entries, f"{field} differs: {answer.status} {answer.body}"
        if field == "status":
            assert answer.status in {one.status for one in entries}, answer.body
            assert answer.content_type == "application/json"


def test_every_accepted_difference_is_needed(answers: dict[str, Answer]) -> None:
    """What no answer differs in any more leaves the table."""
    found = [(row.name, field) for row in RECORDED for field in differing(row, answers[row.name])]
    needed = [one for one in DIFFERENCES if one.always]
    unused = [one for one in needed if not any(one.covers(*pair) for pair in found)]
    assert unused == []
