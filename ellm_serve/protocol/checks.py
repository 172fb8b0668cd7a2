"""vLLM's checks of request bodies, in its order and words.

Those named `check_raw_*` and `check_common` see the body before its types are known and therefore
look at types first; a wrong type is left to the schema unless vLLM has a text of its own for it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ellm_serve.errors import InvalidRequest, shortened
from ellm_serve.protocol.fields import named
from ellm_serve.protocol.limits import MAX_LOGIT_BIASES, MAX_PROMPTS, MAX_SALT_CHARS

_SALT_FORBIDS = frozenset("@/\\\0")


def check_common(data: Mapping[str, Any]) -> None:
    """Checks that completions and chat completions share."""
    _check_response_format(data.get("response_format"))
    if data.get("stream_options") and not data.get("stream"):
        raise named("Stream options can only be defined when `stream=True`.", "stream_options")
    _check_prompt_logprobs(data)
    _check_cache_salt(data.get("cache_salt"))
    biases = data.get("logit_bias")
    if isinstance(biases, Mapping) and len(biases) > MAX_LOGIT_BIASES:
        raise named(
            f"logit_bias has {len(biases)} entries, at most {MAX_LOGIT_BIASES} are allowed.",
            "logit_bias",
        )


def _check_response_format(wanted: object) -> None:
    if not isinstance(wanted, Mapping) or wanted.get("type") != "json_schema":
        return
    if wanted.get("json_schema") is None:
        raise named(
            "When response_format type is 'json_schema', the 'json_schema' field must be provided.",
            "response_format",
        )


def _check_prompt_logprobs(data: Mapping[str, Any]) -> None:
    wanted = data.get("prompt_logprobs")
    if not isinstance(wanted, int):
        return
    if data.get("stream") and (wanted > 0 or wanted == -1):
        raise named("`prompt_logprobs` are not available when `stream=True`.", "prompt_logprobs")
    if wanted < -1:
        raise InvalidRequest(
            "`prompt_logprobs` must be a positive value or -1.", "prompt_logprobs", wanted
        )


def _check_cache_salt(salt: object) -> None:
    if salt is None:
        return
    if not isinstance(salt, str) or not salt:
        raise named("Parameter 'cache_salt' must be a non-empty string if provided.", "cache_salt")
    if len(salt) > MAX_SALT_CHARS or not _SALT_FORBIDS.isdisjoint(salt):
        raise named(
            f"Parameter 'cache_salt' must be at most {MAX_SALT_CHARS} characters and must not"
            " contain '@', '/', '\\\\', or NUL.",
            "cache_salt",
        )


def check_raw_completion(data: Mapping[str, Any]) -> None:
    """Checks of /v1/completions."""
    logprobs = data.get("logprobs")
    if logprobs is not None:
        if not isinstance(logprobs, int):
            raise InvalidRequest("`logprobs` must be an integer.", "logprobs", logprobs)
        if logprobs < -1:
            raise InvalidRequest("`logprobs` must be a positive value or -1.", "logprobs", logprobs)
    prompt = data.get("prompt")
    if (prompt is None or prompt == "") and data.get("prompt_embeds") is None:
        raise named("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")
    if isinstance(prompt, list):
        _check_prompt_list(prompt)


def _check_prompt_list(prompt: Sequence[object]) -> None:
    if not prompt:
        raise InvalidRequest("You must pass at least one prompt")
    if isinstance(prompt[0], int):
        return  # token ids, or nothing that the schema takes
    if len(prompt) > MAX_PROMPTS:
        raise InvalidRequest(
            f"prompt list length {len(prompt)} exceeds the maximum allowed count of"
            f" {MAX_PROMPTS}. Please send fewer prompts in one request.",
            "prompt",
        )
    if any(isinstance(one, list | str) and not one for one in prompt):
        raise named("Either prompt or prompt_embeds must be provided and non-empty.", "prompt")


def check_raw_chat(data: Mapping[str, Any]) -> None:
    """Checks of /v1/chat/completions."""
    wanted = data.get("top_logprobs")
    if isinstance(wanted, int):
        if wanted < -1:
            raise InvalidRequest(
                "`top_logprobs` must be a positive value or -1.", "top_logprobs", wanted
            )
        if wanted != 0 and not data.get("logprobs"):
            raise named(
                "when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs"
            )
    _check_tools(data)
    check_raw_messages(data)


def check_raw_messages(data: Mapping[str, Any]) -> None:
    """Checks of a conversation and of how its prompt ends."""
    if data.get("continue_final_message") and data.get("add_generation_prompt"):
        raise InvalidRequest(
            "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        )
    if data.get("messages") == []:
        raise InvalidRequest(
            "Cannot apply chat template to an empty conversation. Provide at least one message."
        )


_USAGE = '{"type": "function", "function": {"name": "my_function"}}'


def _check_tools(data: Mapping[str, Any]) -> None:
    tools, choice = data.get("tools"), data.get("tool_choice")
    if tools == []:
        raise named(
            "`tools` must not be an empty array. Either provide at least one tool or omit the field"
            " entirely.",
            "tools",
        )
    if choice is None or choice == "none":
        return
    if tools is None:
        raise named("When using `tool_choice`, `tools` must be set.", "tool_choice")
    if isinstance(choice, Mapping):
        _check_named_tool(choice, tools)
    elif choice not in ("auto", "required"):
        raise named(
            f'Invalid value for `tool_choice`: {shortened(choice)}! Only named tools, "none",'
            ' "auto" or "required" are supported.',
            "tool_choice",
        )


def _check_named_tool(choice: Mapping[str, Any], tools: object) -> None:
    function = choice.get("function")
    if not isinstance(function, Mapping):
        raise named(
            f"Invalid value for `function`: `{shortened(function)}` in `tool_choice`! Correct"
            f" usage: `{_USAGE}`",
            "tool_choice.function",
        )
    name = function.get("name")
    if not name:
        raise named(
            f"Expected field `name` in `function` in `tool_choice`! Correct usage: `{_USAGE}`",
            "tool_choice.function.name",
        )
    functions = (
        [tool.get("function") for tool in tools if isinstance(tool, Mapping)]
        if isinstance(tools, list)
        else []
    )
    if not any(isinstance(one, Mapping) and one.get("name") == name for one in functions):
        raise named(
            "The tool specified in `tool_choice` does not match any of the specified `tools`",
            "tool_choice",
        )
