"""Text in, text out, through the whole engine on the built-in model."""

from __future__ import annotations

import json
import math
import os

import pytest

from ellm_serve import LLM
from ellm_serve.errors import ContextLengthExceeded, EngineError, InvalidRequest
from ellm_serve.request import FinishReason

PROMPTS = ["def fibonacci(n):", "import os\n\n", "class Stack:\n    def push(self, item):\n", "x"]


def test_heldout_loss(llm: LLM) -> None:
    """The loss the model card states comes out of our engine: logits, not just text, are right."""
    stated = json.loads((llm.model_dir / "heldout.json").read_text())
    text = (llm.model_dir / "heldout.txt").read_text(encoding="utf-8")
    ids = llm.tokenizer.encode(text)
    windows = [ids[first : first + stated["window"]] for first in range(0, len(ids), 512)]
    params = llm.sampling(max_tokens=0, prompt_logprobs=0)
    scored = llm.generate([window for window in windows if len(window) > 1], params)
    logprobs = [entry.logprob for one in scored for entry in one.prompt_logprobs if entry]
    assert len(logprobs) == stated["num_tokens"]
    assert -math.fsum(logprobs) / len(logprobs) == pytest.approx(stated["loss"], abs=1e-2)
    assert stated["loss"] < 0.5 * math.log(4096)


def test_a_stream_is_the_completion_in_pieces(llm: LLM) -> None:
    """Pieces put together are the whole answer, and only the last one says why it ended."""
    params = llm.sampling(max_tokens=40, temperature=0)
    pieces = list(llm.stream(PROMPTS[0], params))
    whole = llm.generate(PROMPTS[0], params)[0]
    assert "".join(piece.text for piece in pieces) == whole.text
    assert [piece.finish_reason is not None for piece in pieces[:-1]] == [False] * len(pieces[:-1])
    assert whole.finish_reason is pieces[-1].finish_reason
    assert llm.tokenizer.decode(whole.token_ids) == whole.text


def test_prompts_together_equal_prompts_alone(llm: LLM) -> None:
    """Neighbours in the batch change nothing, sampled with a seed or greedy."""
    for fields in ({"temperature": 0}, {"temperature": 1.0, "seed": 7}):
        params = llm.sampling(max_tokens=24, logprobs=2, **fields)
        together = llm.generate(PROMPTS, params)
        for prompt, one in zip(PROMPTS, together, strict=True):
            alone = llm.generate(prompt, params)[0]
            assert (one.token_ids, one.logprobs) == (alone.token_ids, alone.logprobs)


def test_a_second_turn_prefills_only_what_is_new(llm: LLM) -> None:
    """The session keeps its keys and values, and the answer is what a cold engine gives."""
    params = llm.sampling(max_tokens=16, temperature=0)
    messages: list[dict[str, object]] = [{"role": "user", "content": "What does len do?"}]
    first = llm.chat(messages, params, session="two turns")
    messages += [
        {"role": "assistant", "content": first.text},
        {"role": "user", "content": "And sorted?"},
    ]
    second = llm.chat(messages, params, session="two turns")
    assert second.usage.num_cached_tokens >= first.usage.num_prompt_tokens
    with LLM("builtin", sequence_length=2048, threads=1) as cold:
        again = cold.chat(messages, params)
    assert again.usage.num_cached_tokens == 0
    assert again.token_ids == second.token_ids


def test_stop_string_ends_the_text(llm: LLM) -> None:
    """A stop string is cut off, and the slot goes on serving."""
    params = llm.sampling(max_tokens=40, temperature=0)
    text = llm.generate(PROMPTS[1], params)[0].text
    stop = text[5:8]
    stopped = llm.generate(PROMPTS[1], params, stop=stop)[0]
    assert stopped.text == text[: text.index(stop)]
    assert (stopped.finish_reason, stopped.stop) == (FinishReason.STOP, stop)
    assert llm.generate(PROMPTS[1], params)[0].text == text


def test_a_stop_string_is_counted_as_stop(llm: LLM) -> None:
    """Not as a request that was given up."""
    params = llm.sampling(max_tokens=400, temperature=0, ignore_eos=True)
    before = llm.engine.stats().steps.finished
    llm.generate(PROMPTS[1], params, stop=llm.generate(PROMPTS[1], params)[0].text[5:8])
    llm.generate("x", llm.sampling(max_tokens=1))
    after = llm.engine.stats().steps.finished
    assert after - before == {FinishReason.STOP: 1, FinishReason.LENGTH: 2}


def test_stop_strings_wait_for_min_tokens(llm: LLM) -> None:
    """A stop string that the first tokens hold is ordinary text."""
    params = llm.sampling(max_tokens=40, min_tokens=20, temperature=0, logprobs=0)
    whole = llm.generate(PROMPTS[1], params)[0]
    stop = whole.text[:3]
    again = llm.generate(PROMPTS[1], params, stop=stop)[0]
    assert len(again.token_ids) >= 20
    assert again.text.startswith(stop)


def test_dropping_a_stream_frees_its_slot(llm: LLM) -> None:
    """More abandoned generations than there are slots, then a normal one."""
    for _ in range(3 * llm.config.batch_size):
        stream = llm.stream("x = ", llm.sampling(max_tokens=1500, ignore_eos=True))
        next(stream)
        del stream
        llm.stream("y = ", llm.sampling(max_tokens=1500, ignore_eos=True)).close()
    assert llm.generate("x = ", llm.sampling(max_tokens=4))[0].usage.num_output_tokens > 0
    stats = llm.engine.stats()
    assert stats.num_decoding + stats.num_prefilling + stats.num_waiting == 0


def test_refusals(llm: LLM) -> None:
    """Bad requests are refused before anything is computed, and the engine lives on."""
    with pytest.raises(InvalidRequest, match="empty|token"):
        llm.generate(["fine", ""])
    for bad in (None, [1.5], [["a"]], ["x", 5]):
        with pytest.raises(InvalidRequest, match="prompt"):
            llm.generate(bad)  # type: ignore[arg-type]
    for field, value in (("max_tokens", 1.5), ("seed", "x"), ("top_k", True), ("min_p", "y")):
        with pytest.raises(InvalidRequest, match=field):
            llm.sampling(**{field: value})
    with pytest.raises(ContextLengthExceeded, match="2048"):
        llm.generate([[5] * 5000])
    with pytest.raises(InvalidRequest, match="4096"):
        llm.generate([[4096]])
    with pytest.raises(InvalidRequest, match="unknown sampling parameter 'temprature'"):
        llm.sampling(temprature=1)
    with pytest.raises(InvalidRequest, match="temperature"):
        llm.sampling(temperature=float("nan"))
    assert llm.generate("x", llm.sampling(max_tokens=1))[0].finish_reason is FinishReason.LENGTH


def test_more_prompts_than_the_queue_takes(llm: LLM) -> None:
    """A library call feeds the queue itself, and a stop string ends its prompt at once."""
    params = llm.sampling(max_tokens=2, temperature=0)
    many = llm.generate(["x = "] * 300, params)
    assert len({one.token_ids for one in many}) == 1
    text = llm.generate("x = ", llm.sampling(max_tokens=8, temperature=0))[0].text
    both = llm.generate(
        ["import ", "x = "], llm.sampling(max_tokens=400, temperature=0), stop=text[2:6]
    )
    assert both[1].text == text[:2]
    assert both[1].usage.num_output_tokens < 20


def test_a_sampled_answer_is_not_tokenised_again(llm: LLM) -> None:
    """Whatever ids were sampled, the next turn finds all of them, and computes only the rest."""
    messages: list[dict[str, object]] = [{"role": "user", "content": "What does zip do?"}]
    params = llm.sampling(max_tokens=60, temperature=1.5, top_k=0, top_p=1.0, seed=3)
    for turn in range(3):
        answer = llm.chat(messages, params, session="sampled")
        total = answer.usage.num_prompt_tokens + answer.usage.num_output_tokens
        messages += [
            {"role": "assistant", "content": answer.text},
            {"role": "user", "content": f"More, please ({turn})."},
        ]
        following = llm.chat(messages, llm.sampling(max_tokens=1), session="sampled")
        assert following.usage.num_cached_tokens >= total - 2
        messages[-1:] = []
        messages.append({"role": "user", "content": "And now?"})


def test_a_forked_child_is_told(llm: LLM) -> None:
    """Threads do not survive a fork: the child gets an error instead of waiting for ever."""
    child = os.fork()
    if child == 0:
        try:
            llm.generate("x")
        except EngineError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_sampling_defaults_come_from_the_model(llm: LLM) -> None:
    """What a call gives wins over generation_config.json, which wins over neutral values."""
    params = llm.sampling(temperature=0.0)
    assert (params.temperature, params.top_k, params.top_p) == (0.0, 40, 0.9)
    assert llm.sampling().temperature == pytest.approx(0.7)
    assert llm.sampling().presence_penalty == 0.0
