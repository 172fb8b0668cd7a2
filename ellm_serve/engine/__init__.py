"""Tokens in, tokens out: scheduling, sessions and sampling. Knows no text, HTTP or Ray."""
