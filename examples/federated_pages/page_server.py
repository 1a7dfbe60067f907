"""The web server of a federation: files for browsers, weights for those who have the join token, limits for all."""

from __future__ import annotations

import contextlib
import re
import secrets
import socket
import ssl
import stat
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote

from page_rounds import Aggregator, RefusedError, Weights
from safetensors import SafetensorError
from safetensors.numpy import load

from onnxtrain.errors import OptionError

HEADER_ROOM = 65536
"""Bytes that the names and shapes in a file of weights may take."""

MOST_EXAMPLES = 10**9
LINGER = 5.0
"""Seconds in which the rest of a refused request may arrive."""

HEAD_TIME = 10.0
"""Seconds for the TLS handshake and the head of a request."""

SLOWEST = 64 * 1024
"""Minimum transfer rate of a body, in bytes per second, beyond ``HEAD_TIME``."""

CONNECTIONS = 64
"""Open connections, not counting pages that wait for the end of a round; further ones queue."""

PEM_SIZE = 1 << 20
"""Largest size of a file of certificates or of a key, in bytes."""

LOOPBACK = ("127.0.0.1", "localhost", "[::1]")
OPEN_FILES = re.compile(r".*\.(html|js|mjs|wasm)")
"""Files that browsers get without the join token: programs, and nothing of the model."""

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
    ".json": "application/json",
    ".wasm": "application/wasm",
}


class PageServer(ThreadingHTTPServer):
    """Serve the files of a folder and the weights of a federation.

    Args:
        host: The address to listen on.
        port: The port to listen on; 0 takes a free one.
        folder: Its files are served, and no others.
        aggregator: Averages the weights.
        tls: Encrypts connections.

    Raises:
        OptionError: The address cannot be listened on.
    """

    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self, host: str, port: int, folder: Path, aggregator: Aggregator, tls: ssl.SSLContext | None = None
    ) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.token = secrets.token_urlsafe(16)
        self.files = {path.name: path for path in folder.iterdir() if path.is_file()}
        self.aggregator = aggregator
        self.scheme = "http" if tls is None else "https"
        self._tls = tls
        self._free = threading.Semaphore(CONNECTIONS + aggregator.bounds.pages)
        self._open: dict[socket.socket, float | None] = {}
        self._changing = threading.Lock()
        try:
            super().__init__((host, port), Handler)
        except (OSError, OverflowError, UnicodeError) as error:
            reason = getattr(error, "strerror", None) or error
            raise OptionError(f"Cannot listen on {host!r}, port {port}: {reason}; see --host and --port.") from error

    def server_bind(self) -> None:
        """Bind, without asking the network for the name of the machine."""
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = self.server_address[:2]

    @property
    def url(self) -> str:
        """URL to open, with the join token. Browsers do not send the fragment, the part behind #."""
        host = f"[{self.server_name}]" if ":" in self.server_name else self.server_name
        return f"{self.scheme}://{host}:{self.server_port}/#token={self.token}"

    @property
    def is_local(self) -> bool:
        """Return whether only this machine can reach the server."""
        return self.server_name in ("127.0.0.1", "::1")

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection, if there is room for one more."""
        if not self._free.acquire(timeout=0.2):
            raise OSError("all connections are in use")  # serve_forever retries at once
        try:
            return super().get_request()
        except OSError:
            self._free.release()
            raise

    def process_request_thread(self, request: socket.socket, client_address: Any) -> None:
        """Handle a connection until its answer or its deadline."""
        self.give_time(request, HEAD_TIME)
        try:
            if self._tls is not None:
                plain = request
                request = self._tls.wrap_socket(plain, server_side=True, do_handshake_on_connect=False)
                self.give_time(request, HEAD_TIME)
                self._forget(plain)
                request.do_handshake()
            self.finish_request(request, client_address)
        except OSError:
            pass  # the browser has gone, or it was no browser
        except Exception:
            self.handle_error(request, client_address)
        finally:
            self._forget(request)
            self.shutdown_request(request)
            self._free.release()

    def give_time(self, connection: socket.socket, seconds: float | None) -> None:
        """Set the deadline of a connection: it is closed if it is still open then."""
        with self._changing:
            self._open[connection] = None if seconds is None else time.monotonic() + seconds

    def service_actions(self) -> None:
        """Close connections that are past their deadline; called twice a second."""
        now = time.monotonic()
        with self._changing:
            for connection, deadline in self._open.items():
                if deadline is not None and deadline < now:
                    shut_down(connection)

    def stop(self) -> None:
        """Stop listening, and close all connections, whatever their clients do."""
        self.shutdown()
        self.aggregator.close()
        self.server_close()
        with self._changing:
            for connection in self._open:
                shut_down(connection)

    def _forget(self, connection: socket.socket) -> None:
        with self._changing:
            self._open.pop(connection, None)


def shut_down(connection: socket.socket) -> None:
    """Shut down a connection that another thread uses; that thread gets an end of file or an error."""
    with contextlib.suppress(OSError):
        socket.socket.shutdown(connection, socket.SHUT_RDWR)  # SSLSocket.shutdown changes its state


class Handler(BaseHTTPRequestHandler):
    """Files of the page; ``GET /weights?page=...``, and ``POST /weights?page=...&round=...&examples=...``.

    Files of the model and weights need the header ``Authorization: Bearer TOKEN``.
    """

    server: PageServer

    def do_GET(self) -> None:
        """Answer with a file, or with the weights."""
        self._answer(self._get)

    def do_HEAD(self) -> None:
        """Answer as GET does, without the content."""
        self._answer(self._file)

    def do_POST(self) -> None:
        """Receive weights; answer with the average."""
        self._answer(self._post_weights)

    def end_headers(self) -> None:
        """Forbid browsers to cache files, since the next training has other files with the same names."""
        self.send_header("Cache-Control", "no-store")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("X-Content-Type-Options", "nosniff")
        super().end_headers()

    def log_message(self, *_: Any) -> None:
        """Print no requests."""

    def _answer(self, work: Callable[[str, dict[str, str]], tuple[str, bytes, int]]) -> None:
        headers = {}
        page = ""
        try:
            self._check_origin()
            path, query = self._split()
            kind, content, number = work(path, query)
            status = HTTPStatus.OK
            page = query.get("page", "")
        except RefusedError as error:
            number, status, kind, content = -1, error.status, "text/plain; charset=utf-8", str(error).encode()
            if status == HTTPStatus.UNAUTHORIZED:
                headers["WWW-Authenticate"] = "Bearer"
        self._allow_bytes(len(content))
        self.send_response(status)
        for name, value in {"Content-Type": kind, "Content-Length": len(content), "Round": number, **headers}.items():
            self.send_header(name, str(value))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)
        self.close_connection = True
        if status != HTTPStatus.OK:
            self._read_rest()
        elif page:
            self.server.aggregator.finished(page)

    def _read_rest(self) -> None:
        """Read the rest of a refused request until the page closes its side.

        Closing earlier would reset the connection, and the page would lose the answer.
        """
        self.connection.shutdown(socket.SHUT_WR)
        end = time.monotonic() + LINGER
        while (rest := end - time.monotonic()) > 0:
            self.connection.settimeout(rest)
            if not self.connection.recv(65536):
                return

    def _allow_bytes(self, count: int) -> None:
        self.server.give_time(self.connection, HEAD_TIME + count / SLOWEST)

    def _check_origin(self) -> None:
        """Refuse other sites' pages, also after DNS rebinding."""
        host, origin = self.headers.get("Host", ""), self.headers.get("Origin")
        own = f"{self.server.scheme}://{host}"
        if (self.server.is_local and host.rpartition(":")[0] not in LOOPBACK) or origin not in (None, own):
            raise RefusedError(HTTPStatus.FORBIDDEN, "Only pages of this server may ask it for anything.")

    def _check_token(self) -> None:
        """Refuse clients without the join token."""
        scheme, _, given = self.headers.get("Authorization", "").partition(" ")
        known = secrets.compare_digest(given.strip().encode("utf-8", "replace"), self.server.token.encode())
        if scheme.lower() != "bearer" or not known:
            raise RefusedError(
                HTTPStatus.UNAUTHORIZED,
                "The join token is wrong or missing; open the address that the server printed, or enter its token.",
            )

    def _split(self) -> tuple[str, dict[str, str]]:
        """Return the path and the arguments of a request."""
        path, _, query = self.path.partition("?")
        try:
            path = unquote(path, errors="strict")
            named = parse_qs(query, errors="strict", max_num_fields=20)
        except ValueError:
            raise RefusedError(HTTPStatus.BAD_REQUEST, "The address is not UTF-8, or has too many parts.") from None
        if not path.isprintable():
            raise RefusedError(HTTPStatus.BAD_REQUEST, "The address has characters that no file of this server has.")
        return path, {name: values[0] for name, values in named.items()}

    def _file(self, path: str, query: dict[str, str]) -> tuple[str, bytes, int]:
        name = path.removeprefix("/") or "index.html"
        if not OPEN_FILES.fullmatch(name):
            self._check_token()
        if name not in self.server.files:
            raise RefusedError(HTTPStatus.NOT_FOUND, "There is no such file.")
        file = self.server.files[name]
        return KINDS.get(file.suffix, "application/octet-stream"), file.read_bytes(), -1

    def _get(self, path: str, query: dict[str, str]) -> tuple[str, bytes, int]:
        if path != "/weights":
            return self._file(path, query)
        self._check_token()
        number, content = self.server.aggregator.join(page_name(query))
        return "application/octet-stream", content, number

    def _post_weights(self, path: str, query: dict[str, str]) -> tuple[str, bytes, int]:
        self._check_token()
        if path != "/weights":
            raise RefusedError(HTTPStatus.NOT_FOUND, "Weights are sent to /weights.")
        page = page_name(query)
        number = integer("round", query.get("round", ""), 0)
        examples = integer("examples", query.get("examples", ""), 1)
        with self.server.aggregator.sending(page, number, examples):
            weights = self._weights()
            self.server.give_time(self.connection, None)  # the round may end much later
            number, content = self.server.aggregator.submit(page, number, examples, weights)
        return "application/octet-stream", content, number

    def _weights(self) -> Weights:
        own = self.server.aggregator.weights
        most = sum(array.nbytes for array in own.values()) + HEADER_ROOM
        length = self.headers.get("Content-Length", "")
        if not re.fullmatch(r"[0-9]{1,15}", length):
            raise RefusedError(HTTPStatus.LENGTH_REQUIRED, "The request needs a Content-Length.")
        if int(length) > most:
            raise RefusedError(
                HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"{length} bytes were sent; the weights take at most {most}."
            )
        self._allow_bytes(int(length))
        try:
            content = self.rfile.read(int(length))
        except OSError:
            content = b""
        if len(content) < int(length):
            raise RefusedError(HTTPStatus.BAD_REQUEST, f"{length} bytes were announced, and {len(content)} came.")
        try:
            return load(content)
        except (SafetensorError, KeyError, TypeError, ValueError, OverflowError, MemoryError) as error:
            raise RefusedError(HTTPStatus.BAD_REQUEST, f"The body is not a safetensors file: {error}.") from None


def page_name(query: dict[str, str]) -> str:
    """Return the name that a page has given itself.

    Raises:
        RefusedError: There is none, or it is not 1 to 64 letters, digits and hyphens.
    """
    page = query.get("page", "")
    if not re.fullmatch(r"[0-9a-zA-Z-]{1,64}", page):
        raise RefusedError(HTTPStatus.BAD_REQUEST, "page needs up to 64 letters and digits that name the page.")
    return page


def integer(name: str, text: str, least: int) -> int:
    """Parse an integer argument of a request.

    Raises:
        RefusedError: The text is no integer, or out of range.
    """
    if re.fullmatch(r"[0-9]{1,10}", text) and least <= int(text) <= MOST_EXAMPLES:
        return int(text)
    raise RefusedError(
        HTTPStatus.BAD_REQUEST, f"{name} is {text[:40]!r}; it needs an integer from {least} to {MOST_EXAMPLES}."
    )


def encryption(certificate: Path | None, key: Path | None) -> ssl.SSLContext | None:
    """Return the TLS context for a certificate; ``None`` without one.

    Args:
        certificate: A PEM file: the server's certificate first, then those of the authorities above it.
        key: A PEM file with its private key, or None if the first file has the key, too.

    Raises:
        OptionError: A file cannot be used.
    """
    if certificate is None:
        if key is not None:
            raise OptionError("--key is given without --certificate; give both for TLS.")
        return None
    encrypted = False

    def password() -> str:
        nonlocal encrypted
        encrypted = True
        return ""

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    check_pem("--certificate", certificate, b"CERTIFICATE-----")
    check_pem("--key", key or certificate, b"PRIVATE KEY-----")
    try:
        context.load_cert_chain(certificate, key, password)
    except ssl.SSLError as error:
        files = f"--certificate {str(certificate)!r}" + (f" and --key {str(key)!r}" if key else "")
        if encrypted:
            reason = "the key is encrypted; decrypt it with 'openssl pkey'"
        elif error.reason in ("KEY_VALUES_MISMATCH", "KEY_TYPE_MISMATCH"):
            reason = "the key is of another certificate; give the key that the certificate was made with"
        else:
            reason = f"they are damaged or too weak ({error.reason or error}); make them anew"
        raise OptionError(f"{files} cannot be used: {reason}.") from None
    except OSError as error:
        raise OptionError(f"--certificate cannot be read: {error.strerror}.") from None
    return context


def check_pem(flag: str, path: Path, block: bytes) -> None:
    """Refuse a file that is not of the kind that OpenSSL reads.

    Raises:
        OptionError: It cannot be read, or has no such block.
    """
    try:
        found = path.stat()
        is_small = stat.S_ISREG(found.st_mode) and found.st_size <= PEM_SIZE
        content = path.read_bytes() if is_small else b""
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OptionError(f"{flag} {str(path)!r} cannot be read: {reason}.") from None
    if not is_small:
        raise OptionError(f"{flag} {str(path)!r} needs to be a regular file of at most {PEM_SIZE} bytes.")
    if b"-----BEGIN " not in content or block not in content:
        what = block.decode().strip("-").lower()
        more = ", or give its file as --key" if flag == "--key" else ""
        raise OptionError(f"{flag} {str(path)!r} has no {what} in PEM form (-----BEGIN ...); convert it{more}.")


def warn_unencrypted(host: str) -> None:
    """Warn that connections are not encrypted."""
    print(
        f"Without --certificate, everyone on the network path to {host} can read the join token and the weights.",
        file=sys.stderr,
        flush=True,
    )
