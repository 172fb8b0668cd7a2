"""The HTTP API's bodies as vLLM 0.3x speaks them: pydantic models, their checks and error texts.

Knows the wire and `SamplingParams`; no text, no model, no engine, no HTTP framework.
"""
