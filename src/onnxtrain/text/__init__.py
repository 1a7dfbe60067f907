"""Texts to train language models on: chats, prompts with completions, instructions, plain texts."""

from __future__ import annotations

from onnxtrain.public_names import public_names
from onnxtrain.text.chat_data import ChatData

__all__ = ["ChatData"]

__dir__ = public_names(__name__)
