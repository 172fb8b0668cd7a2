"""Tags in a text that arrives in pieces: is it here, is it not, or is it too early to say?

Every test answers True, False or None; None means that more text may still decide, so the same
text gets the same answer wherever it is cut.
"""

from __future__ import annotations

from collections.abc import Sequence

TOOL_CALL = "<tool_call>"
TOOL_CALL_END = "</tool_call>"

WHITESPACE = " \t\r\n"
# So much white space may stand between two tags that belong together.
MAX_GAP = 64


def tag_at(text: str, position: int, tags: Sequence[str]) -> bool | None:
    """Whether one of the tags starts at the position."""
    if text.startswith(tuple(tags), position):
        return True
    rest = text[position : position + max(map(len, tags))]
    return None if any(tag.startswith(rest) for tag in tags) else False


def after_gap(text: str, position: int, skipped: str = WHITESPACE) -> int | None:
    """The position of the first character that is not skipped, within the limit for gaps.

    None: the text ends before it. Where the gap is too wide, a position inside of it.
    """
    end = position
    while end < len(text) and text[end] in skipped:
        if end - position == MAX_GAP:
            return end
        end += 1
    return end if end < len(text) else None


def followed_by(
    text: str, position: int, tags: Sequence[str], skipped: str = WHITESPACE
) -> bool | None:
    """Whether one of the tags stands behind the position and a gap."""
    start = after_gap(text, position, skipped)
    return None if start is None else tag_at(text, start, tags)


def num_unsure(text: str, tags: Sequence[str]) -> int:
    """How many characters at the end of the text may be the start of a tag.

    Tags have their only `<` in front, so no other place than the last `<` comes into question.
    """
    start = text.rfind("<", max(0, len(text) - max(map(len, tags)) + 1))
    if start < 0 or tag_at(text, start, tags) is False:
        return 0
    return len(text) - start


def opens_call(text: str, position: int, inner: str) -> bool | None:
    """Whether a `<tool_call>` element with `inner` as the start of its body is at the position."""
    found = tag_at(text, position, (TOOL_CALL,))
    return followed_by(text, position + len(TOOL_CALL), (inner,)) if found else found
