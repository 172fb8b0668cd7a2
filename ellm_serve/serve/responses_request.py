"""From a request of /v1/responses to one of chat completions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ellm_serve.errors import InvalidRequest, shortened
from ellm_serve.protocol.chat import ChatCompletionRequest
from ellm_serve.protocol.conversion import converted
from ellm_serve.protocol.responses import ResponsesRequest
from ellm_serve.serve.context import RequestContext
from ellm_serve.serve.foreign import log_skipped, session_of

Message = dict[str, Any]

# Fields that mean the same on both sides.
_SAME = (
    "model",
    "stream",
    "temperature",
    "top_p",
    "top_k",
    "presence_penalty",
    "frequency_penalty",
    "repetition_penalty",
    "seed",
    "stop",
    "ignore_eos",
    "logit_bias",
    "priority",
    "cache_salt",
    "skip_special_tokens",
    "structured_outputs",
    "chat_template_kwargs",
    "vllm_xargs",
)
# What servers of OpenAI's do by themselves; the model here has not seen it happen.
_HOSTED = frozenset(
    (
        "code_interpreter_call",
        "computer_call",
        "computer_call_output",
        "file_search_call",
        "image_generation_call",
        "mcp_approval_request",
        "mcp_approval_response",
        "mcp_call",
        "mcp_list_tools",
        "web_search_call",
    )
)
_CALLS = {"function_call": "arguments", "custom_tool_call": "input"}
_CALL_OUTPUTS = ("function_call_output", "custom_tool_call_output")
_PARTS = {
    "input_text": "text",
    "output_text": "text",
    "text": "text",
    "summary_text": "text",
    "reasoning_text": "text",
    "refusal": "refusal",
}


def to_chat(
    request: ResponsesRequest,
    history: Sequence[Message],
    messages: Sequence[Message],
    context: RequestContext,
    max_model_len: int,
) -> ChatCompletionRequest:
    """The same as a chat request.

    history: what was said before, in messages of chat requests. messages: the input's. A limit of
    the output that a slot does not reach is none, as in vLLM.

    Raises:
        InvalidRequest: a field has a value that is not allowed.
    """
    orders = [] if request.instructions is None else [system(request.instructions)]
    tools, limit = offered_tools(request), request.max_output_tokens
    values = {name: getattr(request, name) for name in _SAME} | {
        "messages": [*orders, *history, *messages],
        "max_tokens": limit if limit is None or limit < max_model_len else None,
        "tools": [{"type": "function", "function": tool} for tool in tools] or None,
        "tool_choice": _tool_choice(request) if tools else _without_tools(request),
        "parallel_tool_calls": request.parallel_tool_calls,
        "reasoning_effort": None if request.reasoning is None else request.reasoning.effort,
        "response_format": _response_format(request),
        "truncate_prompt_tokens": -1 if request.truncation == "auto" else None,
        "session_id": session_of(
            request.session_id, context, request.vllm_xargs, request.prompt_cache_key
        ),
    }
    return converted(ChatCompletionRequest, values)


def system(text: str) -> Message:
    """A message from whoever runs the conversation."""
    return {"role": "system", "content": text}


# --- items ---------------------------------------------------------------------------------------


def to_messages(items: str | Iterable[Mapping[str, Any]]) -> list[Message]:
    """The messages that the items of an input, or of an answer, make up.

    A thought, what is said after it and the calls after that are one message of the assistant's.

    Raises:
        InvalidRequest: an item makes no sense here.
    """
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    messages: list[Message] = []
    for number, item in enumerate(items):
        _add(item, f"input[{number}]", messages)
    return messages


def _add(item: Mapping[str, Any], param: str, messages: list[Message]) -> None:
    kind = item.get("type", "message")
    if not isinstance(kind, str):
        raise InvalidRequest(f"{param}.type must be a string.", f"{param}.type")
    if kind == "message":
        _add_message(item, param, messages)
    elif kind == "reasoning":
        _add_thought(item, param, messages)
    elif kind in _CALLS:
        _add_call(item, _CALLS[kind], param, messages)
    elif kind in _CALL_OUTPUTS:
        call_id, output = _string(item, "call_id", param), item.get("output", "")
        content = output if isinstance(output, str) else _content(output, f"{param}.output")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": content})
    elif kind in _HOSTED:
        log_skipped("input items", kind)
    else:
        raise InvalidRequest(
            f"{param} has the type {shortened(kind)!r}, which is not supported.", f"{param}.type"
        )


def _add_message(item: Mapping[str, Any], param: str, messages: list[Message]) -> None:
    role, content = _string(item, "role", param), _content(item.get("content"), f"{param}.content")
    last = messages[-1] if messages else {}
    if role == "assistant" and last.get("role") == "assistant" and not last["content"]:
        last["content"] = content
    else:
        messages.append({"role": role, "content": content})


def _add_thought(item: Mapping[str, Any], param: str, messages: list[Message]) -> None:
    """A thought opens the assistant's next message. An encrypted one, or a summary, is none."""
    parts = _content(item.get("content") or [], f"{param}.content")
    text = parts if isinstance(parts, str) else "".join(part["text"] for part in parts)
    if text:
        messages.append({"role": "assistant", "content": "", "reasoning": text})


def _add_call(item: Mapping[str, Any], field: str, param: str, messages: list[Message]) -> None:
    function = {"name": _string(item, "name", param), "arguments": _string(item, field, param)}
    call = {"id": _string(item, "call_id", param), "type": "function", "function": function}
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant", "content": ""})
    messages[-1].setdefault("tool_calls", []).append(call)


def _content(value: object, param: str) -> str | list[Message]:
    """A content's text parts. Images are for others to refuse."""
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise InvalidRequest(f"{param} must be a string or a list of parts.", param)
    return [_part(part, f"{param}[{number}]") for number, part in enumerate(value)]


def _part(part: object, param: str) -> Message:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        raise InvalidRequest(f"{param} must be an object with a type.", param)
    if kind == "input_image":
        return {"type": kind}
    if kind not in _PARTS:
        raise InvalidRequest(
            f"{param} has the type {shortened(kind)!r}, which is not supported.", f"{param}.type"
        )
    return {"type": "text", "text": _string(part, _PARTS[kind], param)}


def _string(item: Mapping[str, Any], field: str, param: str) -> str:
    value = item.get(field)
    if not isinstance(value, str):
        raise InvalidRequest(f"{param}.{field} must be a string.", f"{param}.{field}")
    return value


# --- tools and form ------------------------------------------------------------------------------


def offered_tools(request: ResponsesRequest) -> list[Message]:
    """The functions among the tools that the model may call, in their own form.

    Raises:
        InvalidRequest: a function has no name.
    """
    allowed = _allowed_names(request)
    offered: list[Message] = []
    for number, tool in enumerate(request.tools or []):
        if tool.get("type") != "function":
            log_skipped("tools", tool.get("type"))
            continue
        name = _string(tool, "name", f"tools[{number}]")
        if allowed is None or name in allowed:
            fields = ("description", "parameters", "strict")
            present = {key: tool[key] for key in fields if tool.get(key) is not None}
            offered.append({"name": name, **present})
    return offered


def _allowed_names(request: ResponsesRequest) -> frozenset[str] | None:
    choice = request.tool_choice
    if not isinstance(choice, dict) or choice.get("type") != "allowed_tools":
        return None
    tools = choice.get("tools")
    named = [tool.get("name") for tool in tools if isinstance(tool, dict)] if tools else []
    return frozenset(name for name in named if isinstance(name, str))


def _tool_choice(request: ResponsesRequest) -> object:
    choice = request.tool_choice
    if not isinstance(choice, dict):
        return choice
    if choice.get("type") == "allowed_tools":
        return choice.get("mode") or "auto"
    if choice.get("type") == "function":
        name = _string(choice, "name", "tool_choice")
        return {"type": "function", "function": {"name": name}}
    raise InvalidRequest(
        f"tool_choice of type {shortened(choice.get('type'))!r} is not supported.", "tool_choice"
    )


def _without_tools(request: ResponsesRequest) -> object:
    """Only a choice that asks for a call is a mistake then."""
    choice = request.tool_choice
    return None if choice in (None, "auto", "none") else _tool_choice(request)


def _response_format(request: ResponsesRequest) -> dict[str, Any] | None:
    form = None if request.text is None else request.text.format
    if form is None or form.type == "text":
        return None
    if form.type == "json_object":
        return {"type": "json_object"}
    if form.schema_ is None:
        raise InvalidRequest("text.format must have a schema.", "text.format.schema")
    schema: dict[str, Any] = {"name": form.name or "answer", "schema": form.schema_}
    if form.strict is not None:
        schema["strict"] = form.strict
    return {"type": "json_schema", "json_schema": schema}
