"""Texts to train language models on: chats, prompts with completions, instructions, plain texts; texts to compare."""

from __future__ import annotations

from onnxtrain.errors._internal import public_names
from onnxtrain.plugins.text.chat_data import ChatData
from onnxtrain.plugins.text.comparison_data import ComparisonData

__all__ = ["ChatData", "ComparisonData"]

__dir__ = public_names(__name__)
