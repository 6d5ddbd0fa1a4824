"""API keys: who may ask, and whose prefix cache is whose."""

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from aiohttp import web

from trtcb.errors import UsageError
from trtcb.server.errors import ApiError

OPEN_PATHS = frozenset({"/health", "/ready"})  # probes carry no secrets

_SCOPE: web.RequestKey[str] = web.RequestKey("cache_scope", str)


class ApiKeys:
    """The accepted keys, kept as digests: comparing takes equal time whatever a client sends. No keys: all may ask."""

    def __init__(self, keys: Sequence[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __bool__(self) -> bool:
        return bool(self._digests)

    def admit(self, request: web.Request) -> None:
        """Raise a 401 unless the request carries one of the keys as its bearer token."""
        if not self._digests:
            return
        scheme, _, token = request.headers.get("Authorization", "").partition(" ")
        given = _digest(token.strip().encode("utf-8", "surrogateescape"))
        # Every key is compared, found or not.
        matches = [hmac.compare_digest(given, digest) for digest in self._digests]
        if scheme.lower() != "bearer" or not any(matches):
            raise ApiError(
                401,
                "Send a valid key as Authorization: Bearer KEY.",
                kind="authentication_error",
                code="invalid_api_key",
            )
        if len(self._digests) > 1:
            request[_SCOPE] = f"key{matches.index(True)}"


def cache_scope(request: web.Request, salt: str | None) -> str:
    """Return the engine's ``cache_salt``: prefixes cross neither salts nor, where there are several, keys."""
    scope = request.get(_SCOPE, "")
    return f"{scope}/{salt or ''}" if scope else salt or ""


def tenant_of(request: web.Request, user: str | None) -> str:
    """On whose account a call is: where there are several keys, its key's (``key0`` is the first), else ``user``'s."""
    return request.get(_SCOPE, "") or user or ""


def read_keys(path: Path) -> tuple[str, ...]:
    """Read one key a line; empty lines and lines that begin with ``#`` are skipped."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"The API key file {path} cannot be read ({type(error).__name__}): name a text file."
        ) from error
    keys = tuple(line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))
    if not keys:
        raise UsageError(f"The API key file {path} holds no key: write one a line.")
    return keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
