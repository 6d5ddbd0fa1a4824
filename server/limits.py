"""What the server accepts and how long it waits. Every limit is checked before anything is allocated for a request."""

from dataclasses import dataclass

MAX_STOP_STRINGS = 16
MAX_STOP_CHARS = 256
MAX_STOP_TOKEN_IDS = 256
MAX_CHOICES = 128  # `n`, and no more than a batch holds
MAX_MESSAGES = 2048  # turns of a conversation, and parts of one turn
MAX_LABEL_CHARS = 256  # `user` and `cache_salt`


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of the HTTP side. ``api_keys`` are the secrets themselves, not the path of their file; times in seconds.

    ``port=0`` lets the system choose. ``keepalive_comment_s`` is how often a queued stream is told that it is not dead,
    ``write_stall_s`` how long a client may refuse to read before its requests are aborted, ``health_stall_s`` how long
    the engine may make no progress, with work at hand, before ``/health`` says so.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str | None = None
    api_keys: tuple[str, ...] = ()
    insecure: bool = False
    overload_status: int = 429
    max_body_bytes: int = 4 << 20
    max_prompts_per_call: int = 256
    header_timeout_s: float = 10.0
    body_timeout_s: float = 30.0
    idle_timeout_s: float = 75.0
    keepalive_comment_s: float = 15.0
    write_stall_s: float = 30.0
    send_buffer_bytes: int = 64 << 10
    offload_bytes: int = 16 << 10
    shutdown_timeout_s: float = 30.0
    health_stall_s: float = 30.0
    retry_after_s: int = 1
