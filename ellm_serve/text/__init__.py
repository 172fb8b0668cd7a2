"""Strings to token ids and back: tokenizer, chat template, detokenizer, stop strings.

Knows nothing of HTTP, arrays or requests; the layers above bring text and ids together with them.
"""

from ellm_serve.text.answer import AnswerText
from ellm_serve.text.chat_encoder import ChatEncoder, ChatPrompt
from ellm_serve.text.chat_template import ChatTemplate, RenderLimits
from ellm_serve.text.control_text import MarkedText
from ellm_serve.text.detokenizer import IncrementalDetokenizer
from ellm_serve.text.messages import NormalizedMessages, normalize_messages
from ellm_serve.text.stop import StopStrings
from ellm_serve.text.tokenizer import Tokenizer

__all__ = [
    "AnswerText",
    "ChatEncoder",
    "ChatPrompt",
    "ChatTemplate",
    "IncrementalDetokenizer",
    "MarkedText",
    "NormalizedMessages",
    "RenderLimits",
    "StopStrings",
    "Tokenizer",
    "normalize_messages",
]
