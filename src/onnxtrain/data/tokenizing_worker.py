"""Encode texts in a process of its own, since an untrusted tokenizer.json may abort it.

Run as a script by path, with a minimum of imports. Requests and answers are JSON after their length in eight bytes. The
first request has the tokenizer, its memory limit and names of padding tokens; later ones have texts.
"""

import json
import struct
import sys
from array import array
from typing import Any, BinaryIO

_SIZE = struct.Struct("<Q")


def read(stream: BinaryIO) -> Any:
    """Read a message; ``None`` at the end."""
    head = stream.read(_SIZE.size)
    return json.loads(stream.read(_SIZE.unpack(head)[0])) if len(head) == _SIZE.size else None


def write(stream: BinaryIO, message: Any) -> None:
    """Write a message."""
    data = json.dumps(message).encode()
    stream.write(_SIZE.pack(len(data)) + data)
    stream.flush()


def _limit_memory(size: int) -> None:
    try:
        import resource
    except ImportError:  # not on Windows
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    size = size if hard == resource.RLIM_INFINITY else min(size, hard)
    resource.setrlimit(resource.RLIMIT_AS, (size, hard))


def main() -> None:
    """Answer requests until there are no more."""
    from tokenizers import Tokenizer

    given, answers = sys.stdin.buffer, sys.stdout.buffer
    tokenizer: Any = None
    while (request := read(given)) is not None:
        try:
            if tokenizer is None:
                _limit_memory(request["memory"])
                tokenizer = Tokenizer.from_str(request["tokenizer"])
                write(answers, {"ids": [tokenizer.token_to_id(name) for name in request["names"]]})
                continue
            found = tokenizer.encode_batch(request["texts"])
            ids, types = array("I"), array("I")
            for each in found:
                ids.extend(each.ids)
                types.extend(each.type_ids)
            write(answers, {"lengths": [len(each.ids) for each in found]})
            answers.write(ids.tobytes() + types.tobytes())
            answers.flush()
        except BaseException as error:  # a Rust panic is not an Exception
            write(answers, {"error": f"{error}"[:300] or type(error).__name__})
            if not isinstance(error, Exception):
                return


if __name__ == "__main__":
    main()
