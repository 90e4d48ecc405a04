"""The HTTP protocol of the server, with a limit on what comes before and after a body.

httptools has none: a header that never ends is kept and copied with every read of it, before any key is checked.
(Measured: 100 MB of it stopped the event loop for seconds, 300 MB for a minute.)
"""

from __future__ import annotations

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from producers.problems import Problem, native_body

_MOST = 64 * 1024  # bytes, give or take one read
_REFUSAL = Problem("head_too_large", f"the request's head has more than {_MOST} bytes")


class BoundedHeads(HttpToolsProtocol):
    """Ends a connection whose request head, chunk extension or trailer goes on for too long."""

    _unheard = 0  # bytes since the last that became a head or a body

    def data_received(self, data: bytes) -> None:
        self._unheard += len(data)
        super().data_received(data)
        if self._unheard > _MOST and not self.transport.is_closing():
            self._refuse()

    def on_headers_complete(self) -> None:
        self._unheard = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unheard = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unheard = 0
        super().on_message_complete()

    def _refuse(self) -> None:
        # There is no cycle before the first request, whatever uvicorn's annotation says.
        answering = self.cycle is not None and not self.cycle.response_complete  # type: ignore[redundant-expr]
        if not answering:  # an answer being written must not get another one into its middle
            self.transport.write(_refusal())
        self.transport.close()


def _refusal() -> bytes:
    body = msgspec.json.encode(native_body(_REFUSAL, request_id=""))
    head = (
        "HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/problem+json\r\n"
        f"content-length: {len(body)}\r\nconnection: close\r\n\r\n"
    )
    return head.encode() + body
