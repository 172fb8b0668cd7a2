"""Response models give the recorded bodies back byte for byte: keys, their order, nulls."""

from __future__ import annotations

import json

import pytest
from pydantic import BaseModel

from ellm_serve.protocol.chat import (
    ChatChunk,
    ChatChunkChoice,
    ChatCompletionResponse,
    ChatDelta,
)
from ellm_serve.protocol.common import (
    Chunk,
    ModelCard,
    ModelList,
    ModelPermission,
    PromptTokensDetails,
    UsageInfo,
)
from ellm_serve.protocol.completion import (
    CompletionChoice,
    CompletionChunk,
    CompletionChunkChoice,
    CompletionResponse,
)
from ellm_serve.protocol.tokenize import DetokenizeResponse, TokenizeResponse
from tests.protocol.recorded import RECORDED, Recorded

RESPONSES: dict[str, type[BaseModel]] = {
    "/v1/completions": CompletionResponse,
    "/v1/chat/completions": ChatCompletionResponse,
    "/tokenize": TokenizeResponse,
    "/detokenize": DetokenizeResponse,
}
CHUNKS: dict[str, type[Chunk]] = {
    "/v1/completions": CompletionChunk,
    "/v1/chat/completions": ChatChunk,
}
# Answers with tool calls or thoughts have keys that this server does not produce yet.
OTHER = ("tool", "hermes", "reason")

ANSWERS = [
    record
    for record in RECORDED.values()
    if record.status == 200 and (record.name == "tool_none" or not record.name.startswith(OTHER))
]
WHOLE = [record for record in ANSWERS if not record.body.startswith("data: ")]
STREAMS = [record for record in ANSWERS if record.body.startswith("data: ")]


@pytest.mark.parametrize("record", WHOLE, ids=lambda record: record.name)
def test_whole_answers(record: Recorded) -> None:
    """Nothing is lost, added or moved."""
    response = RESPONSES[record.path].model_validate_json(record.body)
    assert response.model_dump_json() == record.body


@pytest.mark.parametrize("record", STREAMS, ids=lambda record: record.name)
def test_frames(record: Recorded) -> None:
    """A frame has the keys it was given and no others."""
    chunk = CHUNKS[record.path]
    frames = record.frames
    assert len(frames) >= 2
    for frame in frames:
        assert chunk.model_validate_json(frame).json_bytes().decode() == frame


def test_frames_from_code() -> None:
    """`object` is there without being given; defaults that were not given stay away."""
    chat = ChatChunk(
        id="chatcmpl-1",
        created=5,
        model="m",
        choices=[
            ChatChunkChoice(
                index=0, delta=ChatDelta(content="世"), logprobs=None, finish_reason=None
            )
        ],
    )
    assert chat.json_bytes().decode() == (
        '{"id":"chatcmpl-1","object":"chat.completion.chunk","created":5,"model":"m","choices":'
        '[{"index":0,"delta":{"content":"世"},"logprobs":null,"finish_reason":null}]}'
    )
    text = CompletionChunk(
        id="cmpl-1",
        created=5,
        model="m",
        choices=[CompletionChunkChoice(index=0, text='"')],
        usage=UsageInfo(
            prompt_tokens=1,
            total_tokens=2,
            completion_tokens=1,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=0),
        ),
    )
    assert text.json_bytes().decode() == (
        '{"id":"cmpl-1","object":"text_completion","created":5,"model":"m","choices":'
        '[{"index":0,"text":"\\""}],"usage":{"prompt_tokens":1,"total_tokens":2,'
        '"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":0}}}'
    )


def test_whole_answer_from_code() -> None:
    """Built from the few values that matter, a whole answer has every key."""
    record = RECORDED["cmpl_basic"]
    body = json.loads(record.body)
    response = CompletionResponse(
        id=body["id"],
        created=body["created"],
        model="qwen3-coder",
        choices=[
            CompletionChoice(
                index=0, text="Hello there, world. This is a test.", finish_reason="stop"
            )
        ],
        system_fingerprint=body["system_fingerprint"],
        usage=UsageInfo(
            prompt_tokens=2,
            total_tokens=18,
            completion_tokens=16,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=0),
        ),
    )
    assert response.model_dump_json() == record.body


def test_model_list() -> None:
    """As recorded from /v1/models, one card per name; ids and times are drawn."""
    card = ModelCard(id="a", root="/m", max_model_len=2048)
    text = ModelList(data=[card, ModelCard(id="b")]).model_dump_json()
    permission = card.permission[0]
    assert permission.id.startswith("modelperm-")
    assert len(permission.id) == len("modelperm-81f30d3b397b2b63")
    assert permission.id != ModelPermission().id
    assert text.startswith(
        f'{{"object":"list","data":[{{"id":"a","object":"model","created":{card.created},'
        '"owned_by":"vllm","root":"/m","parent":null,"max_model_len":2048,"permission":'
        f'[{{"id":"{permission.id}","object":"model_permission","created":{permission.created},'
        '"allow_create_engine":false,"allow_sampling":true,"allow_logprobs":true,'
        '"allow_search_indices":false,"allow_view":true,"allow_fine_tuning":false,'
        '"organization":"*","group":null,"is_blocking":false}]},{"id":"b",'
    )
