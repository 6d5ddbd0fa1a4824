"""llama.cpp's own HTTP server out of ``xllamacpp``, with the settings of ``llama-server``. Serves until it is ended.

python peer_llama_server.py MODEL PORT THREADS SLOTS SLOT_TOKENS
"""

import sys
import threading

import xllamacpp


def main() -> None:
    """Serve."""
    model = sys.argv[1]
    port, threads, num_slots, slot_tokens = map(int, sys.argv[2:])
    params = xllamacpp.CommonParams()
    params.model.path, params.hostnames, params.port = model, ["127.0.0.1"], port
    params.n_parallel, params.n_ctx, params.kv_unified = num_slots, num_slots * slot_tokens, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    params.flash_attn_type = xllamacpp.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_ENABLED
    params.cache_ram_mib = 0
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main()
