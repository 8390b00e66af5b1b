"""TLS in front of a server that knows none: `python -m tests.contract.tls_proxy PORT SOCKET CERTIFICATE CA`.

A process of its own. Takes only clients with a certificate of that authority, and hands their bytes to the server's
unix socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
import sys


async def _copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()
    writer.close()


async def main(port: str, socket: str, certificate: str, authority: str) -> None:
    """Serve until killed."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=authority)
    context.load_cert_chain(certificate)
    context.verify_mode = ssl.CERT_REQUIRED

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            inner_reader, inner_writer = await asyncio.open_unix_connection(socket)
        except OSError:
            writer.close()
            return
        await asyncio.gather(_copy(reader, inner_writer), _copy(inner_reader, writer))

    server = await asyncio.start_server(serve, "127.0.0.1", int(port), ssl=context)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
