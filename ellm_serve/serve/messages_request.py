"""From a request of /v1/messages to one of chat completions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ellm_serve.errors import InvalidRequest, shortened
from ellm_serve.protocol.chat import ChatCompletionRequest
from ellm_serve.protocol.conversion import converted
from ellm_serve.protocol.messages import (
    ContentBlock,
    CountTokensRequest,
    MessagesRequest,
    MessagesTool,
    Turn,
)
from ellm_serve.protocol.tokenize import TokenizeChatRequest
from ellm_serve.serve.context import RequestContext
from ellm_serve.serve.conversation import is_noise
from ellm_serve.serve.foreign import log_skipped, session_of

Message = dict[str, Any]

MIN_THINKING_TOKENS = 1024
_TOOL_CHOICES = {"auto": "auto", "any": "required", "none": "none"}
_USER_SESSION = re.compile(r"_session_([!-~]+)$")


def to_chat(request: MessagesRequest, context: RequestContext) -> ChatCompletionRequest:
    """The same as a chat request.

    Raises:
        InvalidRequest: a field has a value that is not allowed.
    """
    _check_thinking(request)
    values = _conversation(request) | {
        "max_tokens": request.max_tokens,
        "stop": request.stop_sequences,
        "stream": request.stream,
        "temperature": request.temperature,
        "top_p": request.top_p,
        "top_k": request.top_k,
        "cache_salt": request.cache_salt,
        "vllm_xargs": request.vllm_xargs,
        "session_id": _session(request, context),
        **_tool_choice(request),
    }
    if request.output_config is not None and request.output_config.format is not None:
        schema = {"name": "answer", "schema": request.output_config.format.schema_}
        values["response_format"] = {"type": "json_schema", "json_schema": schema}
    return converted(ChatCompletionRequest, values)


def to_tokenize(request: CountTokensRequest) -> TokenizeChatRequest:
    """The request for the tokens of its prompt.

    Raises:
        InvalidRequest: a field has a value that is not allowed.
    """
    return converted(TokenizeChatRequest, _conversation(request))


def _conversation(request: CountTokensRequest) -> dict[str, Any]:
    """What the prompt is made of."""
    system = _system_texts(request.system or [])
    opening = [{"role": "system", "content": _parts(system)}] if system else []
    return {
        "model": request.model,
        "messages": [*opening, *_messages(request.messages)],
        "tools": _tools(request.tools or []) or None,
        "chat_template_kwargs": _template_variables(request) or None,
    }


# --- messages ------------------------------------------------------------------------------------


def _messages(turns: Iterable[Turn]) -> list[Message]:
    messages: list[Message] = []
    held: list[Message] = []
    for turn in turns:
        if turn.role == "system":
            texts = _system_texts(turn.content)
            # Nothing may stand between a call and its result.
            target = held if messages and "tool_calls" in messages[-1] else messages
            target += [{"role": "system", "content": _parts(texts)}] if texts else []
            continue
        if isinstance(turn.content, str):
            messages.append({"role": turn.role, "content": turn.content})
        else:
            messages += (_assistant if turn.role == "assistant" else _user)(turn.content)
        messages += held
        held = []
    return messages + held


def _system_texts(content: str | Sequence[ContentBlock]) -> list[str]:
    texts = [content] if isinstance(content, str) else [block.text or "" for block in content]
    return [text for text in texts if text and not is_noise(text)]


def _parts(texts: Iterable[str]) -> list[Message]:
    return [{"type": "text", "text": text} for text in texts]


def _user(blocks: Iterable[ContentBlock]) -> list[Message]:
    """Results of tools are messages of their own, in front of what the user says."""
    results: list[Message] = []
    said: list[Message] = []
    for block in blocks:
        if block.type == "tool_result":
            call_id = block.tool_use_id or block.id or ""
            content = _result_content(block.content)
            results.append({"role": "tool", "tool_call_id": call_id, "content": content})
        else:
            said += _said(block)
    return [*results, {"role": "user", "content": said}] if said or not results else results


def _assistant(blocks: Iterable[ContentBlock]) -> list[Message]:
    said: list[Message] = []
    thoughts: list[str] = []
    calls: list[Message] = []
    for block in blocks:
        if block.type == "thinking":
            thoughts.append(block.thinking or "")
        elif block.type == "tool_use":
            calls.append(_call(block))
        else:
            said += _said(block)
    message: Message = {"role": "assistant", "content": said}
    if thoughts:
        message["reasoning"] = "".join(thoughts)
    if calls:
        message["tool_calls"] = calls
    return [message]


def _said(block: ContentBlock) -> list[Message]:
    """Text, or an image for others to refuse."""
    if block.type == "image":
        return [{"type": "image_url", "image_url": {"url": ""}}]
    return _parts([block.text]) if block.type == "text" and block.text else []


def _call(block: ContentBlock) -> Message:
    if not block.name:
        raise InvalidRequest("A tool_use block must have a name.", "messages")
    try:
        arguments = json.dumps(block.input or {}, ensure_ascii=False)
    except RecursionError:
        raise InvalidRequest("The input of a tool_use block is nested too deeply.") from None
    function = {"name": block.name, "arguments": arguments}
    return {"id": block.id or "", "type": "function", "function": function}


def _result_content(content: str | Sequence[Mapping[str, Any]] | None) -> str | list[Message]:
    """What a tool has answered; its images are for others to refuse."""
    if content is None or isinstance(content, str):
        return content or ""
    return [
        {"type": "image_url"} if part.get("type") == "image" else dict(part) for part in content
    ]


# --- tools, thinking, session --------------------------------------------------------------------


def _tools(tools: Iterable[MessagesTool]) -> list[Message]:
    offered: list[Message] = []
    for tool in tools:
        if tool.type not in (None, "custom"):
            log_skipped("tools", tool.type)
            continue
        if tool.input_schema is None:
            raise InvalidRequest(f"The tool {shortened(tool.name)} has no input_schema.", "tools")
        function = {"name": tool.name, "parameters": {"type": "object"} | tool.input_schema}
        if tool.description is not None:
            function["description"] = tool.description
        offered.append({"type": "function", "function": function})
    return offered


def _tool_choice(request: MessagesRequest) -> dict[str, Any]:
    """Without tools only a choice that asks for one is a mistake."""
    choice = request.tool_choice
    if choice is None or (not request.tools and choice.type in ("auto", "none")):
        return {}
    named = {"type": "function", "function": {"name": choice.name or ""}}
    return {
        "tool_choice": named if choice.type == "tool" else _TOOL_CHOICES[choice.type],
        "parallel_tool_calls": not choice.disable_parallel_tool_use,
    }


def _template_variables(request: CountTokensRequest) -> dict[str, Any]:
    """Variables of the chat template; the request's own ones win."""
    variables: dict[str, Any] = {}
    effort = request.output_config.effort if request.output_config is not None else None
    if effort is not None:
        variables |= {"reasoning_effort": effort, "enable_thinking": effort != "none"}
    if request.thinking is not None and request.thinking.type != "adaptive":
        variables["enable_thinking"] = request.thinking.type == "enabled"
    return variables | (request.chat_template_kwargs or {})


def _check_thinking(request: MessagesRequest) -> None:
    budget = None if request.thinking is None else request.thinking.budget_tokens
    if budget is None:
        return
    if budget < MIN_THINKING_TOKENS:
        raise InvalidRequest(
            f"thinking.budget_tokens must be at least {MIN_THINKING_TOKENS}.",
            "thinking.budget_tokens",
            budget,
        )
    if budget >= request.max_tokens:
        raise InvalidRequest(
            "thinking.budget_tokens must be less than max_tokens.", "thinking.budget_tokens", budget
        )


def _session(request: MessagesRequest, context: RequestContext) -> str | None:
    """The session that the body names, unless something that comes first names one."""
    named = _session_of_user(request.metadata.user_id if request.metadata is not None else None)
    return session_of(request.session_id, context, request.vllm_xargs, named)


def _session_of_user(user_id: str | None) -> str | None:
    """Two spellings are in use: a JSON object, and a name that ends with the session's."""
    if not user_id:
        return None
    found = _USER_SESSION.search(user_id)
    if found is not None:
        return found[1]
    try:
        names = json.loads(user_id)
    except (ValueError, RecursionError):
        return None
    session = names.get("session_id") if isinstance(names, dict) else None
    return session if isinstance(session, str) else None
