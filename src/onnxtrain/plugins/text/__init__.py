"""Texts to train language models on: chats, prompts with completions, instructions, plain texts; texts to compare."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
