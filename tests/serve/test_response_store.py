"""What is kept of answers, for whom, for how long, and how much of it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ellm_serve.errors import ResponseNotFound
from ellm_serve.serve.response_store import ResponseStore

BODY = b"{}"


def say(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_conversation_is_that_of_all_answers_before() -> None:
    """In order; several may go on from one."""
    store = ResponseStore()
    store.put("", "a", None, say("1"), b"A")
    store.put("", "b", "a", say("2"), b"B")
    store.put("", "c", "a", say("3 ä"), b"C")
    assert store.conversation("", "a") == say("1")
    assert store.conversation("", "b") == say("1") + say("2")
    assert store.conversation("", "c") == say("1") + say("3 ä")
    assert [store.body("", name) for name in "abc"] == [b"A", b"B", b"C"]


def test_nobody_else_finds_them() -> None:
    """What another one has is as unknown as what never was."""
    store = ResponseStore()
    store.put("mine", "a", None, say("1"), BODY)
    for principal, name in (("yours", "a"), ("", "a"), ("mine", "b")):
        for look in (store.body, store.conversation):
            with pytest.raises(ResponseNotFound) as caught:
                look(principal, name)
            assert caught.value.message == f"Response with id '{name}' not found."
            assert caught.value.status == 404


def test_number() -> None:
    """The one not used for longest goes first."""
    store = ResponseStore(max_responses=2)
    for name in "ab":
        store.put("", name, None, say(name), BODY)
    store.body("", "a")
    store.put("", "c", None, say("c"), BODY)
    assert store.body("", "a") and store.body("", "c")
    with pytest.raises(ResponseNotFound):
        store.body("", "b")


def test_bytes() -> None:
    """All together stay below the limit; one that is larger by itself is not kept."""
    store = ResponseStore(max_bytes=10_000)
    for number in range(50):
        store.put("", str(number), None, say("x" * 2000), BODY)
        assert store.num_bytes <= 10_000
    assert 2 <= len(store) <= 5 and store.body("", "49")
    store.put("", "large", None, say("x" * 10_000), BODY)
    with pytest.raises(ResponseNotFound):
        store.body("", "large")
    assert store.body("", "49")


def test_lifetime() -> None:
    """From the last use on, which is one of all answers before it too."""
    clock = Clock()
    store = ResponseStore(lifetime_s=10, clock=clock)
    store.put("", "a", None, say("1"), BODY)
    store.put("", "alone", None, say("2"), BODY)
    clock.now = 8
    store.put("", "b", "a", say("3"), BODY)
    clock.now = 16
    assert store.conversation("", "b") == say("1") + say("3")
    with pytest.raises(ResponseNotFound):
        store.body("", "alone")
    clock.now = 27
    with pytest.raises(ResponseNotFound):
        store.conversation("", "b")
    assert (len(store), store.num_bytes) == (0, 0)


def test_putting_again_replaces() -> None:
    """And the bytes are counted once."""
    store = ResponseStore()
    store.put("", "a", None, say("1"), BODY)
    before = store.num_bytes
    store.put("", "a", None, say("2"), BODY)
    assert (store.num_bytes, store.conversation("", "a")) == (before, say("2"))


@given(st.lists(st.tuples(st.integers(0, 20), st.booleans()), max_size=60), st.integers(1, 8))
def test_what_is_found_is_whole(steps: list[tuple[int, bool]], most: int) -> None:
    """However answers follow each other and are used: one that is there has all those before it."""
    store = ResponseStore(max_responses=most)
    told: list[list[dict[str, str]]] = []
    for number, (earlier, uses) in enumerate(steps):
        parent = earlier if earlier < number else None
        try:
            history = [] if parent is None else store.conversation("", str(parent))
        except ResponseNotFound:
            parent, history = None, []
        told.append(history + say(str(number)))
        store.put("", str(number), None if parent is None else str(parent), say(str(number)), BODY)
        if uses and earlier <= number:
            _look(store, earlier)
        assert len(store) <= most
        for name in range(number + 1):
            if _look(store, name):
                assert store.conversation("", str(name)) == told[name]


def _look(store: ResponseStore, name: int) -> bool:
    try:
        store.body("", str(name))
    except ResponseNotFound:
        return False
    return True
