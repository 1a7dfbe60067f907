"""The loop of a process with limited memory: answer requests by a script until there are no more.

Run by path with the path of a script, with a minimum of imports. The script defines ``start(settings)``, which returns
an answer and a function ``respond(request)``; that returns an answer and bytes. A request is JSON after its length in
eight bytes; a reply is two lengths, JSON and the bytes.
"""

import json
import runpy
import struct
import sys
from typing import Any


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
    given, answers = sys.stdin.buffer, sys.stdout.buffer
    start = runpy.run_path(sys.argv[1], run_name="script")["start"]
    respond: Any = None
    while len(head := given.read(8)) == 8:
        request = json.loads(given.read(struct.unpack("<Q", head)[0]))
        following, failure = b"", None
        try:
            if respond is None:
                _limit_memory(request["memory"])
                answer, respond = start(request["settings"])
            else:
                answer, following = respond(request)
            data = json.dumps({"answer": answer}).encode()
        except BaseException as error:  # a Rust panic is not an Exception
            failure = error
            data = json.dumps({"error": f"{error}"[:300] or type(error).__name__}).encode()
        answers.write(struct.pack("<QQ", len(data), len(following)) + data)
        answers.write(following)
        answers.flush()
        if failure is not None and not isinstance(failure, Exception):
            return


if __name__ == "__main__":
    main()
