"""Sampling defaults a model ships in `generation_config.json`.

Every field is optional: None leaves the request's own default in force. Fields that would change
the output in a way this engine does not implement are refused nowhere here: the file only holds
defaults, and the keys below are all that a server applies.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ellm_serve.model.config import ModelConfig
from ellm_serve.model.fields import JsonFields
