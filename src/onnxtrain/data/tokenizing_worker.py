"""Encode texts; the script of a process of its own, since an untrusted tokenizer.json may abort it."""

from array import array
from typing import Any

from tokenizers import Tokenizer


def start(settings: Any) -> tuple[Any, Any]:
    """Open a tokenizer; return the ids of the given names, and the function that encodes, decodes and finds ids."""
    tokenizer = Tokenizer.from_str(settings["tokenizer"])

    def respond(request: Any) -> tuple[Any, bytes]:
        if "ids" in request:
            return tokenizer.decode(request["ids"], skip_special_tokens=True), b""
        if "token" in request:
            return tokenizer.token_to_id(request["token"]), b""
        texts = [text if isinstance(text, str) else tuple(text) for text in request["texts"]]  # or pairs of texts
        found = tokenizer.encode_batch(texts, add_special_tokens=request["special"])
        arrays = [array("I") for _ in range(4)]
        for each in found:
            starts, ends = zip(*each.offsets, strict=True) if each.offsets else ((), ())
            for values, more in zip(arrays, (each.ids, each.type_ids, starts, ends), strict=True):
                values.extend(more)
        return [len(each.ids) for each in found], b"".join(values.tobytes() for values in arrays)

    return [tokenizer.token_to_id(name) for name in settings["names"]], respond
