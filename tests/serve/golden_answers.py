"""The recorded answers of a real vLLM, and how ours may differ from them.

`DIFFERENCES` is the whole list of accepted differences; a test fails for one that is not there, and
for an entry that no answer needs any more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

from tests.serve.golden_story import story

_FILE = Path(__file__).parent / "golden/answers.jsonl"


@dataclass(frozen=True)
class Recorded:
    """One request and its answer."""

    name: str
    method: str
    path: str
    request_headers: Mapping[str, str]
    request: object
    status: int
    headers: Mapping[str, str]
    body: str

    @property
    def forced_ids(self) -> list[int]:
        """What the recorded model was made to say."""
        extra = self.request.get("vllm_xargs") if isinstance(self.request, dict) else None
        forced = (extra or {}).get("force", "")
        return [int(token) for token in forced.split(",") if token]

    @property
    def request_body(self) -> bytes | None:
        """As it was sent."""
        if self.request is None:
            return None
        if isinstance(self.request, str):
            return self.request.encode()
        return json.dumps(_expanded(self.request)).encode()


def recorded() -> list[Recorded]:
    """All of them."""
    lines = _FILE.read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    return [Recorded(**{**row, "request_headers": row["request_headers"] or {}}) for row in rows]


def _expanded(value: object) -> object:
    """A request with its long lists and texts written out."""
    if isinstance(value, dict):
        if "$repeat" in value:
            return [value["$repeat"]] * value["times"]
        if "$repeat_text" in value:
            return value["$repeat_text"] * value["times"]
        return {key: _expanded(item) for key, item in value.items()}
    return [_expanded(item) for item in value] if isinstance(value, list) else value


# --- comparing -----------------------------------------------------------------------------------

# Keys whose values name an instance and not a behaviour: of these only the kind is compared.
_INSTANCE = frozenset(
    (
        *("created", "created_at", "system_fingerprint", "signature"),
        *("logprob", "token_logprobs", "rank"),
    )
)
# What is made up anew for each answer.
_NEW_ID = re.compile(r"(resp_|msg_|fc_|chatcmpl-tool-)[0-9a-f]{16}")
# And these, where the model was not made to say something.
_SPOKEN = frozenset(("text", "content"))


def fields(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """(path, value) of every leaf; of objects the names and of lists the length, so that a missing
    key and another order show as well."""
    if isinstance(value, dict):
        yield f"{path}{{}}", tuple(value)
        for key, item in value.items():
            yield from fields(item, f"{path}.{key}" if path else key)
    elif isinstance(value, list):
        yield f"{path}[]", len(value)
        for i, item in enumerate(value):
            yield from fields(item, f"{path}[{i}]")
    else:
        yield path, value


def comparable(value: object, kinds: frozenset[str]) -> object:
    """The value without what belongs to one instance or to one model's numbers."""
    if isinstance(value, list):
        return [comparable(item, kinds) for item in value]
    if not isinstance(value, dict):
        return value
    return {key: _comparable_item(key, item, kinds) for key, item in value.items()}


def _comparable_item(key: str, item: object, kinds: frozenset[str]) -> object:
    if isinstance(item, str) and (new := _NEW_ID.fullmatch(item)):
        return new.group(1) + "*"
    if key == "id" and isinstance(item, str) and item != "chatcmpl-body-req":
        return item.partition("-")[0] + "-*" if "-" in item else item
    if key in ("top_logprobs", "prompt_logprobs") and isinstance(item, list):
        return list(map(_own_token, item))
    return _kinds(item) if key in kinds else comparable(item, kinds)


def _kinds(value: object) -> object:
    if isinstance(value, list):
        return list(map(_kinds, value))
    if isinstance(value, dict):
        return {key: _kinds(item) for key, item in value.items()}
    return type(value).__name__


def _own_token(position: object) -> object:
    """A position's own token; the others depend on the model, in number and name."""
    if not isinstance(position, dict):
        return position
    return dict([next(iter(_items_of(_kinds(position))), ("", ""))])


def _items_of(value: object) -> Iterable[tuple[object, object]]:
    return value.items() if isinstance(value, dict) else ()


def shape(body: str, content_type: str, forced: bool) -> dict[str, object]:
    """What two answers are compared by."""
    kinds = _INSTANCE if forced else _INSTANCE | _SPOKEN
    if content_type.startswith("text/event-stream"):
        return dict(fields(comparable(story(body), kinds)))
    if content_type.startswith("application/json"):
        return dict(fields(comparable(json.loads(body), kinds)))
    return {"": body}


def differences(ours: Mapping[str, object], theirs: Mapping[str, object]) -> list[str]:
    """The paths at which two answers differ."""
    paths = dict.fromkeys([*theirs, *ours])
    return [path for path in paths if ours.get(path, ...) != theirs.get(path, ...)]


# --- what is accepted ----------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """One way in which our answers differ. `names` and `field` are patterns.

    With a `status`, ours is that, and the rest of the answer an error that is not compared. Where
    an answer is drawn at random, it differs `always` or not.
    """

    names: str
    field: str
    reason: str
    status: int | None = None
    always: bool = True

    def covers(self, name: str, field: str) -> bool:
        """Whether it is about this field of this answer."""
        # Brackets are part of the paths, not of the patterns.
        return fnmatchcase(name, self.names) and fnmatchcase(field, self.field.replace("[", "[[]"))


_BLOCKS = "reused tokens are counted one by one, not in blocks of 128"
_TEMPLATE = "another chat template, which says nothing of tools"
_MODEL = "another model; what it says was not set"
_SPACE = "white space in front of a call is dropped, streamed or not"
_FORCED = "a call that is demanded has its form from the first token on, and ends the answer"

DIFFERENCES = (
    Difference("*", "*cached_tokens", _BLOCKS),
    Difference("*", "*created_cache_tokens", _BLOCKS),
    Difference("resp_*", "*cache_write_tokens", _BLOCKS),
    Difference("anth_*", "*usage.input_tokens", _BLOCKS),
    Difference("anth_*", "*usage.cache_*_input_tokens", _BLOCKS),
    Difference("*", "*usage.prompt_tokens", _TEMPLATE),
    Difference("*", "*usage.total_tokens", _TEMPLATE),
    Difference("anth_count", "*input_tokens", _TEMPLATE),
    Difference("resp_tool", "usage.input_tokens", _TEMPLATE),
    Difference("resp_tool", "max_output_tokens", _TEMPLATE),
    Difference("tool_history", "prompt_text", _TEMPLATE),
    Difference("tool_required", "choices[0].message.tool_calls[0].function.*", _MODEL),
    Difference("err_so_choice", "choices[0].stop_reason", _MODEL, always=False),
    Difference("err_so_choice", "usage.*", _MODEL, always=False),
    Difference("hermes_req*", "*.reasoning", _MODEL),
    Difference("hermes_req*", "*.reasoning_tokens", _MODEL),
    Difference("tool_none", "choices[0].message.content", _SPACE),
    Difference("tool_auto_stream", "*.said.content", _SPACE),
    Difference("anth_tool_stream", "*.delta.text", _SPACE),
    Difference("hermes_stream", "*.said{}", _SPACE),
    Difference("hermes_stream", "*.said.content", _SPACE),
    Difference("hermes_stream", "*.forms{}", _SPACE),
    Difference("hermes_stream", "*.forms.content*", _SPACE),
    Difference("tool_named_stream", "*.said{}", _FORCED),
    Difference("tool_named_stream", "*.said.content", _FORCED),
    Difference("tool_named_stream", "*.forms*", _FORCED),
    Difference("tool_named_stream", "*.finish_reason", _FORCED),
    Difference("anth_*", "error.type", "errors have the type that the API gives them"),
    Difference("get_is_sleeping", "*", "there is no sleep mode", 404),
    Difference("get_version", "version", "our own version"),
    Difference("*", "data[*].root", "another model"),
    Difference("auth_tok", "*", "with keys, every route but the probes needs one", 401),
)
